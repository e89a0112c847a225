"""Code shared by the vLLM engines for training and evaluation, which run inside a worker's process."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, cast

import torch
import vllm
from torch import Tensor
from vllm import LLM, CompletionOutput, RequestOutput
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.engine.llm_engine import LLMEngine

from verl.config.calculator import CalculatorConfig
from verl.config.errors import ConfigError
from verl.config.rollout import EngineConfig
from verl.models.hub import local_folder
from verl.rank import own_metrics
from verl.rank.calculator import capture_options
from verl.rollout.queue import EngineCapacity
from verl.rollout.requests import resolve_dtype
from verl.rollout.shared_memory import private_shared_memory
from verl.utils.distributed import WorkerPlace
from verl.utils.process import freeze_objects
from vllm_patches.streams import KEY

PLUGIN_INACTIVE = (
    "its plugin is not active. Install the project with `pip install -e .`, and if VLLM_PLUGINS is set, add "
    "verl_hidden_states to it"
)

CPU_KV_CACHE_MB = 512
"""Default KV cache size of a CPU engine, in MiB."""
CPU_BLOCK_SIZE = 32
"""Tokens per block of the CPU cache: the minimum for most vLLM kernels. For the others, vLLM overrides it. Responses
share only full blocks of a prompt. With vLLM's default of 128, shorter prompts would be recomputed each time."""


def start_engine(
    path: str,
    place: WorkerPlace,
    config: EngineConfig,
    max_model_len: int,
    trust_remote_code: bool,
    seed: int,
    calculator: CalculatorConfig | None,
    load_format: str = "auto",
    reduces: bool = True,
    **further: Any,
) -> LLM:
    """Start an engine in this process for the model at ``path``. See :func:`engine_options` for other arguments.

    Raises ``ConfigError`` if the model cannot return the states of a requested layer.

    Args:
        load_format: vLLM's load format; ``rollout.engine_kwargs`` takes priority.
        further: Keyword arguments of ``vllm.LLM`` that ``rollout.engine_kwargs`` must not contain.
    """
    options: dict[str, Any] = {"load_format": load_format}
    options |= engine_options(config, max_model_len, trust_remote_code, place.device_type, seed, calculator, reduces)
    # Otherwise, each garbage collection during vLLM's startup would visit every object of every library.
    freeze_objects()
    with private_shared_memory(place), naming_layers(calculator):
        engine = LLM(local_folder(path), **options, **further)
    if config.seeded:
        check_streams(engine)
    return engine


def engine_options(
    config: EngineConfig,
    max_model_len: int,
    trust_remote_code: bool,
    device_type: str,
    seed: int,
    calculator: CalculatorConfig | None,
    reduces: bool = True,
) -> dict[str, Any]:
    """Return keyword arguments for ``vllm.LLM``.

    Args:
        max_model_len: Maximum sequence length in tokens, including prompt and response.
        device_type: ``cpu`` or ``cuda``.
        calculator: Options for measuring hidden states of responses, or None to capture none.
        reduces: Whether to measure states as responses finish, instead of returning them.

    Raises:
        RuntimeError: If the installed vLLM is built for another type of device.
        ConfigError: If ``rollout.engine_kwargs`` contains an argument that vLLM does not have.
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
        # The model's generation_config.json decides which tokens end a response, but not how to sample.
        "generation_config": "vllm",
        "enforce_eager": config.enforce_eager or on_cpu,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": max(config.max_num_batched_tokens, max_model_len),
        "max_model_len": max_model_len,
        "seed": seed,
    }
    if on_cpu:
        options["block_size"] = CPU_BLOCK_SIZE
    kv_cache_memory_mb = config.kv_cache_memory_mb or (CPU_KV_CACHE_MB if on_cpu else 0)
    if kv_cache_memory_mb:
        options["kv_cache_memory_bytes"] = kv_cache_memory_mb << 20
    if config.tensor_parallel_size > 1:
        # vLLM's own all-reduce opens the memory of its peers' GPUs, and first tests access between devices 0 to
        # tensor_parallel_size - 1 of each process. Ray shows each worker only its own GPU, as device 0. To see its
        # engine's GPUs, every worker would have to list them in rank order and place all its models on a device other
        # than 0. This cannot be tested without several GPUs, so NCCL is used. The kernel with which vLLM fuses
        # all-reduce and normalization on some GPUs has the same requirement.
        options["disable_custom_all_reduce"] = True
        options["compilation_config"] = {"pass_config": {"fuse_allreduce_rms": False}}
    options |= check_engine_kwargs(config.engine_kwargs)
    plugin: dict[str, Any] = {}
    if calculator is not None:
        plugin["hidden_states"] = capture_options(calculator, reduces)
    if config.seeded:
        plugin["sampling_streams"] = True
    if plugin:
        options["additional_config"] = {**options.get("additional_config", {}), **plugin}
    return options


def from_stream(stream: int) -> dict[str, Any]:
    """Return ``SamplingParams.extra_args`` that make the plugin sample a request's tokens from ``stream``."""
    return {KEY: stream}


def check_streams(engine: LLM) -> None:
    """Check that an engine in this process samples from the random streams in its requests.

    Raises ``RuntimeError`` if the plugin is inactive, because the engine then ignores the streams.
    """
    if not hasattr(engine.llm_engine.model_executor.driver_worker.worker, "samples_from_streams"):
        raise RuntimeError(f"vLLM {vllm.__version__} does not sample from streams: {PLUGIN_INACTIVE}")


@contextmanager
def naming_layers(calculator: CalculatorConfig | None) -> Iterator[None]:
    """Replace vLLM's error about missing states of intermediate layers with one that mentions ``calculator.layers``."""
    try:
        yield
    except ValueError as error:
        if calculator is None or "states of intermediate layers" not in str(error):
            raise
        raise ConfigError(
            f"calculator.layers={calculator.layers}: vLLM {vllm.__version__} returns only the last layer's states of "
            "this architecture; set calculator.layers=[-1], or in training calculator.source=actor"
        ) from error


@contextmanager
def naming_own_metrics() -> Iterator[None]:
    """Convert errors in custom metrics back to ``ConfigError`` after vLLM has wrapped them."""
    try:
        yield
    except RuntimeError as error:
        _, option, what = str(error).partition(f"{own_metrics.FIELD}=")
        if not option:
            raise
        raise ConfigError(option + what) from error


def check_engine_kwargs(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``rollout.engine_kwargs``. Raise ``ConfigError`` for arguments that the installed ``vllm.LLM`` lacks."""
    known = {*inspect.signature(vllm.LLM.__init__).parameters, *(field.name for field in fields(EngineArgs))}
    for name, value in kwargs.items():
        if name not in known:
            near = get_close_matches(name, sorted(known), n=1)
            fix = f"did you mean {near[0]}?" if near else "its arguments are those of vllm.LLM"
            raise ConfigError(
                f"rollout.engine_kwargs.{name}={value!r}: vLLM {vllm.__version__} has no such argument; {fix}"
            )
    return dict(kwargs)


def engine_capacity(engine: LLMEngine) -> EngineCapacity:
    """Return the number of responses that an engine can decode at once."""
    config = engine.vllm_config
    slots, cache = config.scheduler_config.max_num_seqs, config.cache_config
    # Models with different caches per layer report their own number; older versions of vLLM do not report it.
    sequences = getattr(cache, "kv_cache_max_concurrency", None)
    if not sequences:
        sequences = (cache.num_gpu_blocks or 0) * cache.block_size / config.model_config.max_model_len
    return EngineCapacity(slots, max(1, int(sequences)))


def run_steps(engine: LLMEngine, max_steps: int) -> list[RequestOutput]:
    """Run the engine for at most ``max_steps`` steps and return the finished requests.

    Hidden states are measured in batches: whenever a batch is full, and after the last step.
    """
    collector = getattr(engine, "state_collector", None)
    finished: list[RequestOutput] = []
    with naming_own_metrics(), nullcontext() if collector is None else collector.deferring():
        for _ in range(max_steps):
            if not engine.has_unfinished_requests():
                break
            finished += [cast(RequestOutput, output) for output in engine.step() if output.finished]
    return finished


def num_waiting(engine: LLMEngine) -> int:
    """Count the requests that have not started or were preempted because the engine's cache is full."""
    core: Any = engine.engine_core
    _, waiting = core.engine_core.scheduler.get_request_counts()
    return int(waiting)


def rank_columns(completions: Sequence[CompletionOutput]) -> dict[str, Tensor]:
    """Return the rank metrics of responses, as measured by the engine.

    Raises ``RuntimeError`` if the engine returned no metrics because its plugin is inactive.
    """
    columns: list[dict[str, Tensor] | None] = [getattr(completion, "hidden_states", None) for completion in completions]
    rows = [row for row in columns if row is not None]
    if len(rows) < len(columns):
        raise RuntimeError(f"vLLM {vllm.__version__} returned no hidden states: {PLUGIN_INACTIVE}")
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
