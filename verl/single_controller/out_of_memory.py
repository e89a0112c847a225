"""What a worker says when memory runs out: the phase, its peak, and the options to lower."""

import torch

from verl.config.errors import ConfigError
from verl.single_controller.profiling import MemoryPeak

ENGINE = "lower rollout.max_num_seqs, rollout.gpu_memory_utilization or the longest response"
SCORING = "lower actor.log_prob_micro_batch_size_per_gpu (log_prob_max_token_len_per_gpu with actor.use_dynamic_bsz)"
VALUES = "lower critic.micro_batch_size_per_gpu (ppo_max_token_len_per_gpu with critic.use_dynamic_bsz)"
HOLD = "use more workers, or set model.fsdp.param_offload=true and model.fsdp.optimizer_offload=true"
UPDATE = "set model.gradient_checkpointing=true and model.logits_chunk_size=1024, or use more workers"
LEARNING = f"lower actor.micro_batch_size_per_gpu (ppo_max_token_len_per_gpu with use_dynamic_bsz); {UPDATE}"
FIXES = {
    "start": f"lower rollout.gpu_memory_utilization for the models, or raise it for the engine; {HOLD}",
    "start_generation": f"lower rollout.gpu_memory_utilization; {HOLD}",
    "advance": ENGINE,
    "sync_weights": f"lower rollout.gpu_memory_utilization; {HOLD}",
    "compute_logprobs": SCORING,
    "compute_ref_logprobs": f"{SCORING}, or set ref.param_offload=true",
    "compute_values": VALUES,
    "compute_rm_scores": "lower reward_model.micro_batch_size_per_gpu or reward_model.max_length",
    "update_actor": LEARNING,
    "update_actor_on_policy": LEARNING,
    "update_critic": f"{VALUES}; {UPDATE}",
    "train_step": f"lower data.micro_batch_size_per_gpu or data.max_length; {UPDATE}",
    "evaluate": "lower data.micro_batch_size_per_gpu or data.max_length",
    "save": "set trainer.async_save=false; use more workers",
    "load": HOLD,
}
"""Method of a worker -> which options need less memory in it."""

PHASES = {"start": "start of models and engine", "advance": "gen", "compute_logprobs": "old_log_prob"}
PHASES |= {"compute_ref_logprobs": "ref", "compute_values": "values", "compute_rm_scores": "reward_model"}
PHASES |= {"update_actor_on_policy": "update_actor"}
"""Method of a worker -> its phase in the log, where the two differ."""

ENGINE_MESSAGES = (
    "No available memory for the cache blocks",
    "is less than desired GPU memory utilization",
    "is larger than the available KV cache memory",
)
"""Parts of the messages of vLLM's ``ValueError`` when an engine finds too little memory."""

DRIVER_MESSAGES = ("can't allocate memory", "out of memory")
"""Parts of the messages of ``RuntimeError``s that say so: of torch on a CPU, of CUDA, and of vLLM's warm-up."""


class OutOfMemory(ConfigError):
    """The options need more memory than a worker has."""


def is_out_of_memory(error: Exception) -> bool:
    """Whether ``error`` says that a GPU's or the host's memory is exhausted."""
    text = str(error)
    return (
        isinstance(error, torch.OutOfMemoryError | MemoryError)
        or (isinstance(error, ValueError) and any(part in text for part in ENGINE_MESSAGES))
        or (isinstance(error, RuntimeError) and any(part in text for part in DRIVER_MESSAGES))
    )


def out_of_memory_line(error: Exception, method: str, rank: int, peak: MemoryPeak, device_type: str) -> str:
    """One line for the user.

    Args:
        method: of the worker ``rank``, in which it was raised.
        peak: the most memory in use in this call.
        device_type: ``cpu`` or ``cuda``.
    """
    device, of = "host", ""
    if device_type == "cuda":
        device, of = "GPU", f" of the GPU's {torch.cuda.mem_get_info()[1] / 2**30:.1f}"
    reason = " ".join(str(error).split()) or type(error).__name__
    return (
        f"{PHASES.get(method, method)}: worker {rank} ran out of {device} memory at a peak of {peak.used / 2**30:.1f} "
        f"GiB{of}; {FIXES.get(method, HOLD)}; docs/memory.md tells what takes how much ({reason[:200]})"
    )
