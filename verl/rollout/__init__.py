"""Engines that sample responses inside a worker; each is a file, and has a name in the table."""

import os
import pkgutil

from verl.models.policy import Policy
from verl.rollout.base import Rollout, RolloutSetup

ROLLOUTS = {
    "vllm": "verl.rollout.vllm_rollout:VLLMRollout",
    "hf": "verl.rollout.hf_rollout:HFRollout",
}
"""``rollout.name`` -> the engine's class, by name: an engine loads its libraries where it is used alone."""


def make_rollout(setup: RolloutSetup, policy: Policy) -> Rollout:
    """The engine that ``rollout.name`` asks for; ``policy`` is the one that learns in this worker."""
    rollout: Rollout = pkgutil.resolve_name(ROLLOUTS[setup.config.rollout.name])(setup, policy)
    return rollout


def engine_environment(device_type: str, name: str = "vllm") -> dict[str, str]:
    """Environment of a worker process that holds the engine ``name``; what the user has set already is kept."""
    if name != "vllm":
        return {}
    wanted = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine must share its process with the trained model
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # the second is not tried with the trainer yet
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if device_type == "cpu":
        # vLLM compiles some helpers even in eager mode; on CPU that takes a C++ compiler and 15 s at the first batch.
        wanted["TORCHDYNAMO_DISABLE"] = "1"
    else:
        # All-reduce by memory that GPUs share asks torch for peers with other device numbers, and each worker sees its
        # own GPU alone, as number 0: it fails or, on some machines, waits for ever. NCCL does without.
        wanted |= {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_ALLREDUCE_USE_FLASHINFER": "0"}
    return {name: os.environ.get(name, value) for name, value in wanted.items()}
