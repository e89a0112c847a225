"""Rollout engines, which sample responses inside a worker. Each engine has a module and an entry in ``ROLLOUTS``."""

import ast
import os
import pkgutil
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from verl.config.errors import ConfigError
from verl.config.ppo import PPOConfig
from verl.data.templates import stop_token_ids
from verl.models.info import ModelInfo
from verl.models.policy import Policy
from verl.rollout.base import Rollout, RolloutSetup

ROLLOUTS = {
    "vllm": "verl.rollout.vllm_rollout:VLLMRollout",
    "hf": "verl.rollout.hf_rollout:HFRollout",
}
"""Maps ``rollout.name`` to the import path of the engine class, which avoids importing unused libraries."""


NOT_WITH_VLLM = {"gpt_oss": "samples with wrong experts after a weight sync into vLLM"}
"""Reasons why training with vLLM silently fails, keyed by model type. vLLM's weight loader for gpt_oss writes to the
parameters directly, so a reload does not detect the new weights."""


def make_rollout(setup: RolloutSetup, policy: Policy | None) -> Rollout:
    """Create the engine selected by ``rollout.name``. ``policy`` is the model that this worker trains, or None."""
    rollout: Rollout = pkgutil.resolve_name(ROLLOUTS[setup.config.rollout.name])(setup, policy)
    return rollout


def check_engine_model(config: PPOConfig, device_type: str) -> None:
    """Raise ``ConfigError`` if the engine is known to fail with the policy's architecture on this device."""
    info = ModelInfo.of(config.model)
    kind = info.config.model_type
    if config.rollout.name != "vllm":
        return
    if kind in NOT_WITH_VLLM:
        raise ConfigError(f"model.path={config.model.path!r}: {kind} {NOT_WITH_VLLM[kind]}; set rollout.name=hf")
    check_head_size(info, device_type, "set rollout.name=hf")


def check_head_size(info: ModelInfo, device_type: str, fix: str) -> None:
    """Raise a ``ConfigError`` that ends with ``fix`` if vLLM's CPU attention does not support the model's head size."""
    sizes, config = cpu_head_sizes(), info.text_config
    # Latent attention (MLA) uses another backend.
    if device_type != "cpu" or not sizes or getattr(config, "kv_lora_rank", None):
        return
    heads = getattr(config, "num_attention_heads", None)
    size = getattr(config, "head_dim", None) or (config.hidden_size // heads if isinstance(heads, int) and heads else 0)
    if size and size not in sizes:
        raise ConfigError(
            f"model.path={info.path!r}: head_dim={size}: on a CPU vLLM's attention takes heads of "
            f"{', '.join(map(str, sizes))}; {fix}"
        )


@cache
def cpu_head_sizes() -> list[int]:
    """Return the head sizes supported by the installed vLLM's CPU attention, or an empty list if they are unknown.

    The function parses vLLM's source because importing it takes seconds.
    """
    vllm = find_spec("vllm")
    file = Path(vllm.origin or "").parent / "v1/attention/backends/cpu_attn.py" if vllm else None
    if file is None or not file.is_file():
        return []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name == "get_supported_head_sizes":
            value = node.body[-1]
            if isinstance(value, ast.Return) and isinstance(value.value, ast.List):
                return [int(size) for size in ast.literal_eval(value.value)]
    return []


def end_tokens(config: PPOConfig, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that end a response, as defined by the model, the prompt template and the options.

    Single-token strings in ``rollout.stop`` are included, because engines search for stop strings in text without
    special tokens. Tokens without an embedding are excluded because the model never samples them.
    """
    info, vocabulary, options = ModelInfo.of(config.model), tokenizer.get_vocab(), config.rollout
    of_texts = [vocabulary[string] for string in options.stop if string in vocabulary]
    of_texts += stop_token_ids(config.data.template, tokenizer)
    sampled = [token for token in of_texts if token < info.text_config.vocab_size]
    return info.end_tokens(tokenizer, [*options.stop_token_ids, *sampled])


def engine_environment(device_type: str, name: str = "vllm") -> dict[str, str]:
    """Return the environment variables for a worker of engine ``name``. Variables set by the user take precedence."""
    if name != "vllm":
        return {}
    wanted = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine must share its process with the trained model
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # not tested with the trainer yet
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if device_type == "cpu":
        # vLLM compiles some helpers even in eager mode; on a CPU, this needs a C++ compiler and 15 s at first.
        wanted["TORCHDYNAMO_DISABLE"] = "1"
    else:
        # All-reduce through shared GPU memory needs peers with distinct device numbers, but each worker sees only its
        # own GPU as number 0, so all-reduce fails or, on some machines, hangs. NCCL does not need distinct numbers.
        wanted |= {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_ALLREDUCE_USE_FLASHINFER": "0"}
    return {name: os.environ.get(name, value) for name, value in wanted.items()}
