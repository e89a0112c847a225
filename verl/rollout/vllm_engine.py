"""What the vLLM engines of training and evaluation have in common; both run inside a worker's process."""

from typing import Any

import vllm
from torch import Tensor
from vllm import CompletionOutput
from vllm.platforms import current_platform

from verl.config.common import EngineConfig
from verl.config.signal import CalculatorConfig
from verl.rank.calculator import capture_options
from verl.rollout.requests import resolve_dtype

CPU_KV_CACHE_MB = 512
"""KV cache of a CPU engine where the config leaves its size open, MiB."""


def engine_options(
    config: EngineConfig,
    max_model_len: int,
    trust_remote_code: bool,
    device_type: str,
    seed: int,
    calculator: CalculatorConfig | None,
) -> dict[str, Any]:
    """Keyword arguments of ``vllm.LLM``.

    Args:
        max_model_len: longest sequence in tokens, prompt and response.
        device_type: ``cpu`` or ``cuda``.
        calculator: how the engine measures the hidden states of responses; None: it captures none.

    Raises:
        RuntimeError: the installed vLLM is built for another kind of device.
    """
    on_cpu = device_type == "cpu"
    if current_platform.is_cpu() != on_cpu:
        raise RuntimeError(
            f"device={device_type}: the installed vLLM is built for {current_platform.device_type}; set device to "
            "that, or install the other build with `bash scripts/setup.sh --cpu` or `--gpu`"
        )
    options: dict[str, Any] = {
        "dtype": resolve_dtype(config.dtype, on_cpu),
        "trust_remote_code": trust_remote_code,
        "distributed_executor_backend": "external_launcher",
        "tensor_parallel_size": config.tensor_parallel_size,
        # The model's generation_config.json decides which tokens end a response, not how to sample.
        "generation_config": "vllm",
        "enforce_eager": config.enforce_eager or on_cpu,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": max(config.max_num_batched_tokens, max_model_len),
        "max_model_len": max_model_len,
        "seed": seed,
    }
    kv_cache_memory_mb = config.kv_cache_memory_mb or (CPU_KV_CACHE_MB if on_cpu else 0)
    if kv_cache_memory_mb:
        options["kv_cache_memory_bytes"] = kv_cache_memory_mb << 20
    if config.tensor_parallel_size > 1:
        # vLLM's own all-reduce accesses the GPUs of its peers, but each worker sees only its own.
        options["disable_custom_all_reduce"] = True
    if on_cpu:
        # A prompt computed in chunks rewinds its random stream, which CPU generators do not support.
        options["enable_chunked_prefill"] = False
    if calculator is not None:
        options["additional_config"] = {"hidden_states": capture_options(calculator)}
    return options


def measured(completion: CompletionOutput) -> dict[str, Tensor]:
    """What the engine measured of a response's hidden states, a row of :class:`verl.protocol.RankMetrics`.

    Raises:
        RuntimeError: the engine returned nothing, because its plugin is not active.
    """
    found: dict[str, Tensor] | None = getattr(completion, "hidden_states", None)
    if found is None:
        raise RuntimeError(
            f"vLLM {vllm.__version__} returned no hidden states: its plugin is not active. Install the project with "
            "`pip install -e .`, and if VLLM_PLUGINS is set, add verl_hidden_states to it"
        )
    return found
