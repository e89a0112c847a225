"""Transfers tensors between the host and a GPU.

Plain calls of ``.to("cuda")`` and ``.to("cpu")`` make the host wait until the GPU has finished all previous work.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(values: Tensor, device: torch.device | str) -> Tensor:
    """Return ``values`` on ``device``. Copies to a GPU are asynchronous and do not block the host."""
    if values.device.type == "cpu" and torch.device(device).type == "cuda":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors to the host, synchronizing with the GPU once for all of them."""
    fetched = [values.to("cpu", non_blocking=True) for values in tensors]
    if any(values.is_cuda for values in tensors):
        torch.cuda.current_stream().synchronize()
    return fetched
