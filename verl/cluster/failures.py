"""Classifies failures as recurring program errors, machine failures after which runs resume, or lack of memory."""

import re
import resource
from collections.abc import Mapping

import torch
from ray.exceptions import ObjectLostError
from torch import distributed as dist

from verl.config.errors import ConfigError

NETWORK_ERRORS = (
    # gloo
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting", "gloo/transport"),
    *("connection refused", "Connection timed out", "No route to host", "Network is unreachable"),
    # NCCL and devices
    *("NCCL error", "ncclRemoteError", "ncclSystemError", "ncclInternalError", "NCCL communicator was aborted"),
    *("uncorrectable ECC error", "CUDA error: unspecified launch failure", "GPU has fallen off the bus"),
    "CUDA error: an illegal instruction was encountered",
)
"""Substrings of error messages that indicate a failed collective operation or device."""

ON_GPU = {
    "cache": "rollout.gpu_memory_utilization",
    "workers": "use more workers",
    "hold": "use more workers, or set model.fsdp.param_offload=true and model.fsdp.optimizer_offload=true",
    "ref": "set ref.param_offload=true",
}
"""Values for the placeholders in :data:`FIXES` if a GPU runs out of memory."""
FEWER = "use fewer workers on each machine (trainer.n_gpus_per_node)"
ON_CPU = {"cache": "rollout.kv_cache_memory_mb (0 is 512)"}
ON_CPU |= dict.fromkeys(("workers", "hold", "ref"), f"{FEWER}, or more machines")
"""Values for the placeholders in :data:`FIXES` if the host runs out of memory and the models run on the CPU."""
BESIDE_GPU = f"set model.fsdp.param_offload=false and model.fsdp.optimizer_offload=false, or {FEWER}"
"""Fix to suggest if the host runs out of memory although the models are on GPUs."""

ENGINE = "lower rollout.max_num_seqs, {cache} or the longest response"
SCORING = "lower actor.log_prob_micro_batch_size_per_gpu (log_prob_max_token_len_per_gpu with actor.use_dynamic_bsz)"
VALUES = "lower critic.micro_batch_size_per_gpu (ppo_max_token_len_per_gpu with critic.use_dynamic_bsz)"
UPDATE = "set model.gradient_checkpointing=true and model.logits_chunk_size=1024, or {workers}"
LEARNING = f"lower actor.micro_batch_size_per_gpu (ppo_max_token_len_per_gpu with use_dynamic_bsz); {UPDATE}"
MEMORY_PAGE = "docs/memory.md tells what takes how much"
FIXES = {
    "start": "lower {cache} for the models, or raise it for the engine; {hold}",
    "start_generation": "lower {cache}; {hold}",
    "rollout.advance": ENGINE,
    "rollout.cut": ENGINE,
    "sync_weights": "lower {cache}; {hold}",
    **dict.fromkeys(("perturb_weights", "restore_weights"), "set rollout.check_weights=false; {hold}"),
    "publish_weights": "lower rollout.update_weights_bucket_megabytes; {hold}",
    "load_weights": "lower {cache}",
    "compute_logprobs": SCORING,
    "compute_ref_logprobs": f"{SCORING}, or {{ref}}",
    "compute_teacher_logprobs": f"{SCORING}, or set teacher.model.fsdp.param_offload=true",
    "critic.compute_values": VALUES,
    "reward_model.compute_scores": "lower reward_model.micro_batch_size_per_gpu or reward_model.max_length",
    "actor.update": LEARNING,
    "actor.update_on_policy": LEARNING,
    "critic.update": f"{VALUES}; {UPDATE}",
    "train_step": f"lower data.micro_batch_size_per_gpu or data.max_length; {UPDATE}",
    "evaluate": "lower data.micro_batch_size_per_gpu or data.max_length",
    "save": "set trainer.async_save=false; {workers}",
    "load": "{hold}",
}
"""Maps worker methods to options that lower their memory use."""

PHASES = {
    "start": "start of models and engine",
    **dict.fromkeys(("rollout.advance", "rollout.cut"), "gen"),
    "compute_logprobs": "old_log_prob",
    "compute_ref_logprobs": "ref",
    "compute_teacher_logprobs": "teacher",
    "critic.compute_values": "values",
    "reward_model.compute_scores": "reward_model",
    **dict.fromkeys(("actor.update", "actor.update_on_policy"), "update_actor"),
    "critic.update": "update_critic",
}
"""Maps worker methods to the names of their phases in the log, if the names differ."""

ENGINE_MESSAGES = (
    "No available memory for the cache blocks",
    "is less than desired GPU memory utilization",
    "is larger than the available KV cache memory",
)
"""Substrings of the ``ValueError`` messages that vLLM raises if an engine has too little memory."""

RAY_REPORT = (r"actual memory used=([\d.]+)GB", r" was ([\d.]+)GB used / ([\d.]+)GB limit")
"""Patterns for the memory use of a killed worker and of its machine in Ray's report. Ray's GB are GiB."""

DRIVER_MESSAGES = ("can't allocate memory", "out of memory")
"""Substrings of the ``RuntimeError`` messages of torch on a CPU, CUDA and vLLM's warm-up if memory is exhausted."""


class WorkerError(RuntimeError):
    """Raised if a worker raised an exception or died. The message names the worker, the method and the reason."""


class MachineError(WorkerError):
    """Raised if the cause of a failure is a worker, a machine or the network rather than the program.

    Args:
        where: Worker and method if the worker's machine is still alive, otherwise empty. If the next attempt fails in
            the same worker, method and step, the failure is considered a program error.
        rank: Rank of the lost worker, or None if several workers are affected.
    """

    def __init__(self, message: str, where: str = "", rank: int | None = None) -> None:
        super().__init__(message)
        self.where = where
        self.rank = rank


class HeadLost(MachineError):
    """Raised if the head of the Ray cluster, and thus the whole cluster, is lost."""


class NoRoom(MachineError):
    """Raised if the cluster has no room for the workers, because machines are missing or were just lost."""


class RequeueError(WorkerError):
    """Raised if this process cannot continue its run. Running the same command again resumes the run."""


class NetworkError(RuntimeError):
    """Raised in a worker that lost its connection to other workers, usually because one of them died."""


def is_network_error(error: BaseException) -> bool:
    """Return whether an operation failed because of another worker, the network or a device."""
    seen: BaseException | None = error
    while seen is not None:
        # Ray lost an object, such as weights, together with the worker or machine that stored it.
        if isinstance(seen, dist.DistError | NetworkError | ObjectLostError):
            return True
        if isinstance(seen, RuntimeError) and any(part in str(seen) for part in NETWORK_ERRORS):
            return True
        # torch.distributed.checkpoint collects the exceptions of its ranks.
        failures = getattr(seen, "failures", None)
        if isinstance(failures, dict) and any(is_network_error(entry[0]) for entry in failures.values()):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


class OutOfMemory(ConfigError):
    """Raised if the options need more memory than a worker has."""


def is_out_of_memory(error: Exception) -> bool:
    """Return whether ``error`` reports that a GPU or the host ran out of memory."""
    text = str(error)
    return (
        isinstance(error, torch.OutOfMemoryError | MemoryError)
        or (isinstance(error, ValueError) and any(part in text for part in ENGINE_MESSAGES))
        or (isinstance(error, RuntimeError) and any(part in text for part in DRIVER_MESSAGES))
    )


def fix(method: str, terms: Mapping[str, str]) -> str:
    """Return advice on lowering the memory use of ``method``, where ``terms`` is :data:`ON_GPU` or :data:`ON_CPU`."""
    return FIXES.get(method, "{hold}").format_map(terms)


def out_of_memory_line(error: Exception, method: str, rank: int, peak: int, device_type: str) -> str:
    """Return the error message for a worker that ran out of memory.

    Args:
        method: Worker method that raised the error.
        peak: Peak memory use in bytes during this call.
        device_type: ``cpu`` or ``cuda``.
    """
    device, of, terms = "host", "", ON_CPU
    if device_type == "cuda":
        device, terms = "GPU", ON_GPU
        of = f" of the GPU's {torch.cuda.mem_get_info()[1] / 2**30:.1f}"
    return (
        f"{PHASES.get(method, method)}: worker {rank} ran out of {device} memory at a peak of {peak / 2**30:.1f} "
        f"GiB{of}; {fix(method, terms)}; {MEMORY_PAGE} ({_reason(error)})"
    )


def killed_for_memory_line(report: str, method: str, device_type: str) -> str:
    """Return the error message, without the worker's name, for a worker that Ray killed for lack of host memory.

    Args:
        report: Ray's message, which contains the memory use of the worker and its machine.
        device_type: Device of the models, ``cpu`` or ``cuda``.
    """
    used, machine = (re.search(pattern, report) for pattern in RAY_REPORT)
    peak = f" at {used[1]} GiB" if used else ""
    full = f" as {machine[1]} of its machine's {machine[2]} GiB were in use" if machine else ""
    phase, lower = PHASES.get(method, method), BESIDE_GPU if device_type == "cuda" else fix(method, ON_CPU)
    return f"ran out of host memory in {phase}{peak}: Ray ended it{full}; {lower}; {MEMORY_PAGE}"


def driver_memory_line(error: Exception, phase: str) -> str:
    """Return the error message for a driver that ran out of memory in ``phase``, as named in the log."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    fix = "lower data.train_batch_size, data.val_batch_size, rollout.n or the longest response"
    return f"{phase}: the driver ran out of host memory at a peak of {peak:.1f} GiB; {fix} ({_reason(error)})"


def _reason(error: Exception) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:200]
