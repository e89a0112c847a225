"""Engines that sample responses inside a worker: one file each, and one entry in the table."""

import os
import pkgutil

from verl.models.policy import Policy
from verl.rollout.base import Rollout, RolloutSetup

ROLLOUTS = {
    "vllm": "verl.rollout.vllm_rollout:VLLMRollout",
    "hf": "verl.rollout.hf_rollout:HFRollout",
}
"""``rollout.name`` -> the engine's class, as a string: its libraries are imported only where it is used."""


def make_rollout(setup: RolloutSetup, policy: Policy) -> Rollout:
    """The engine that ``rollout.name`` selects; ``policy`` is the one that this worker trains."""
    rollout: Rollout = pkgutil.resolve_name(ROLLOUTS[setup.config.rollout.name])(setup, policy)
    return rollout


def engine_environment(device_type: str, name: str = "vllm") -> dict[str, str]:
    """Environment variables of a worker with the engine ``name``. Variables that the user has set are kept."""
    if name != "vllm":
        return {}
    wanted = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine must share its process with the trained model
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # the second runner is not tested with the trainer yet
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if device_type == "cpu":
        # vLLM compiles some helpers even in eager mode; on CPU that takes a C++ compiler and 15 s at the first batch.
        wanted["TORCHDYNAMO_DISABLE"] = "1"
    else:
        # All-reduce through shared GPU memory needs peers with other device numbers, but each worker sees only its own
        # GPU, as number 0: it fails or, on some machines, hangs. NCCL does not need it.
        wanted |= {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_ALLREDUCE_USE_FLASHINFER": "0"}
    return {name: os.environ.get(name, value) for name, value in wanted.items()}
