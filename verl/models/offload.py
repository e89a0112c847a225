"""Offloads tensors to host memory between the phases of a step.

FSDP2's ``CPUOffloadPolicy``, which also offloads within a phase, saves more memory. However, every forward and backward
pass then waits for transfers, and AdamW runs on the CPU.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, UntypedStorage, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

SMALLEST_PIECE = 1 << 20
"""Minimum size in bytes of each piece of a host copy except the last."""


class Offloaded:
    """Tensors that are kept on the host and moved to their device only inside ``with offloaded.loaded():``.

    Only the tensors' storage moves. FSDP, optimizers and checkpoints can therefore keep references to the tensor
    objects, but they must not read offloaded tensors.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], enabled: bool, constant: bool = False) -> None:
        """Offload the tensors.

        Args:
            tensors: function that returns the tensors, called at each offload because optimizer state is created late.
            enabled: whether to offload. If False, the tensors stay on their device.
            constant: whether the values never change, so that the host copy can be reused.
        """
        self.enabled = enabled
        self._tensors = tensors
        self._constant = constant
        self._on_host: list[tuple[UntypedStorage, list[Tensor]]] = []
        self._depth = 0
        self._unload()

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """Keep the tensors on their device inside the block. Blocks can be nested."""
        if self._depth == 0:
            self._load()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._unload()

    @torch.no_grad()
    def _load(self) -> None:
        for storage, pieces in self._on_host:
            sizes = [len(piece) for piece in pieces]
            storage.resize_(sum(sizes))
            for part, piece in zip(_bytes_of(storage).split(sizes), pieces, strict=True):
                part.copy_(piece, non_blocking=True)
        if any(storage.device.type == "cuda" for storage, _ in self._on_host):
            torch.cuda.synchronize()
        if not self._constant:
            self._on_host = []

    @torch.no_grad()
    def _unload(self) -> None:
        if not self.enabled:
            return
        if not (self._constant and self._on_host):
            # Views and tied weights share a storage.
            storages = [local_part(tensor).untyped_storage() for tensor in self._tensors()]
            distinct = {storage.data_ptr(): storage for storage in storages if len(storage)}
            self._on_host = [(storage, _copy_on_host(storage)) for storage in distinct.values()]
        on_gpu = any(storage.device.type == "cuda" for storage, _ in self._on_host)
        if on_gpu:
            # Other streams, such as FSDP's, may still be reading the memory that is about to be freed.
            torch.cuda.synchronize()
        for storage, _ in self._on_host:
            storage.resize_(0)
        if on_gpu:
            torch.cuda.empty_cache()


def local_part(tensor: Tensor) -> Tensor:
    """Detach a tensor and return this rank's shard of it, or the whole tensor if it is not sharded."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_offloaded(tensor: Tensor) -> bool:
    """Return whether an :class:`Offloaded` has moved the tensor to the host."""
    local = local_part(tensor)
    return local.numel() > 0 and len(local.untyped_storage()) == 0


def require_loaded(tensors: Iterable[Tensor]) -> None:
    """Raise ``RuntimeError`` if any of ``tensors`` is offloaded."""
    if any(map(is_offloaded, tensors)):
        raise RuntimeError("the model is offloaded to the host's memory; use it inside `with ....loaded():`")


def reshard(model: nn.Module) -> None:
    """Free the unsharded parameters that FSDP keeps in the root module after a forward pass."""
    if isinstance(model, FSDPModule):
        model.reshard()


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a loaded tensor from all ranks and detach it. All ranks must call this function together."""
    require_loaded([tensor])
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else local_part(tensor)  # type: ignore[attr-defined]  # detach keeps the class


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _copy_on_host(storage: UntypedStorage) -> list[Tensor]:
    """Copy the bytes of ``storage`` to the host in pieces whose sizes are given by :func:`piece_sizes`."""
    # Copies to pinned memory are asynchronous and faster.
    pinned = storage.device.type == "cuda"
    parts = _bytes_of(storage).split(piece_sizes(len(storage)))
    pieces = [torch.empty(len(part), dtype=torch.uint8, pin_memory=pinned) for part in parts]
    return [piece.copy_(part, non_blocking=True) for piece, part in zip(pieces, parts, strict=True)]


def piece_sizes(num_bytes: int) -> list[int]:
    """Return sizes that add up to ``num_bytes``: powers of two, and a remainder smaller than ``SMALLEST_PIECE``.

    torch rounds pinned allocations up to a power of two, so a single piece could waste half of its memory.
    """
    sizes = []
    while num_bytes >= SMALLEST_PIECE:
        sizes.append(1 << (num_bytes.bit_length() - 1))
        num_bytes -= sizes[-1]
    return [*sizes, num_bytes] if num_bytes else sizes
