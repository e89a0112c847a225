import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception

from verl.single_controller.failures import is_network_error


def caused_by(cause: BaseException) -> RuntimeError:
    error = RuntimeError("saving failed")
    error.__cause__ = cause
    return error


GLOO = RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:4711")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (GLOO, True),
        (dist.DistNetworkError("The client socket has failed to connect"), True),
        (dist.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited"), True),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), True),
        (caused_by(GLOO), True),
        (CheckpointException("write", {1: _wrap_exception(GLOO)}), True),
        (CheckpointException("write", {1: _wrap_exception(OSError(28, "No space left on device"))}), False),
        (ValueError("Connection closed by peer"), False),  # a user's own words
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (OSError(28, "No space left on device"), False),
    ],
)
def test_which_errors_are_the_networks(error: BaseException, expected: bool):
    assert is_network_error(error) is expected
