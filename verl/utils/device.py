"""Tensors on their way between the host and a GPU.

A plain ``.to("cuda")`` holds the host up until the GPU has done everything before it, and every ``.to("cpu")`` does.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(values: Tensor, device: torch.device | str) -> Tensor:
    """``values`` on ``device``. From the host to a GPU the copy is ordered with the work there, and nothing waits."""
    if values.device.type == "cpu" and torch.device(device).type == "cuda":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy the tensors to the host, with one wait for all of them."""
    fetched = [values.to("cpu", non_blocking=True) for values in tensors]
    if any(values.is_cuda for values in tensors):
        torch.cuda.current_stream().synchronize()
    return fetched
