"""Failures of workers: of the program, which would come again, and of machines, after which a run resumes."""

from torch import distributed as dist

NETWORK_ERRORS = (
    # gloo
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting", "gloo/transport"),
    *("connection refused", "Connection timed out", "No route to host", "Network is unreachable"),
    # NCCL and devices
    *("NCCL error", "ncclRemoteError", "ncclSystemError", "ncclInternalError", "NCCL communicator was aborted"),
    *("uncorrectable ECC error", "CUDA error: unspecified launch failure", "GPU has fallen off the bus"),
    "CUDA error: an illegal instruction was encountered",
)
"""Parts of the messages with which a collective operation or a device fails in a worker."""


class WorkerError(RuntimeError):
    """A worker raised or died; the message says which, where and why."""


class MachineError(WorkerError):
    """A worker, a machine or the network between them failed, not the program.

    Args:
        where: the worker and its method, if its machine lives on: if the next attempt ends with the same failure in the
            same step, the program is at fault after all. Empty for a machine that was lost.
    """

    def __init__(self, message: str, where: str = "") -> None:
        super().__init__(message)
        self.where = where


class HeadLost(MachineError):
    """The head of the Ray cluster is gone, and with it the cluster."""


class NoRoom(MachineError):
    """The cluster has no room for the workers: too few machines, or one of them was lost a moment ago."""


class RequeueError(WorkerError):
    """This process can do no more for its run; the same command, started again, resumes it."""


class NetworkError(RuntimeError):
    """Raised in a worker whose connection to others broke, most often because one of them died."""


def is_network_error(error: BaseException) -> bool:
    """Whether an operation failed because of another worker, the network or a device."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, dist.DistError | NetworkError):
            return True
        if isinstance(seen, RuntimeError) and any(part in str(seen) for part in NETWORK_ERRORS):
            return True
        # torch.distributed.checkpoint collects what its ranks raised.
        failures = getattr(seen, "failures", None)
        if isinstance(failures, dict) and any(is_network_error(entry[0]) for entry in failures.values()):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
