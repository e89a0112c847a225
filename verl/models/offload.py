"""Tensors that live in the host's memory while their device needs the room for something else.

They move as a whole, between phases. FSDP2's ``CPUOffloadPolicy`` would keep parameters on the host within a phase too:
less memory, but every forward and backward pass would wait for the bus and AdamW would run on the CPU.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, UntypedStorage, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

SMALLEST_PIECE = 1 << 20
"""Bytes below which a host copy is not cut further."""


class Offloaded:
    """A set of tensors that is on its device only inside ``with offloaded.loaded():``, and on the host between.

    What moves is the memory behind the tensors: they stay the same objects, so that whoever holds them (FSDP, an
    optimizer, a checkpoint) does not notice. Between, the tensors are empty shells that must not be read.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], enabled: bool, constant: bool = False) -> None:
        """Send the tensors to the host.

        Args:
            tensors: what to move; called each time, for an optimizer has no state before its first step.
            enabled: if not, nothing ever moves.
            constant: whether their values never change, so that the host's copy is made only once.
        """
        self.enabled = enabled
        self._tensors = tensors
        self._constant = constant
        self._on_host: list[tuple[UntypedStorage, list[Tensor]]] = []
        self._depth = 0
        self._unload()

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """Have the tensors on their device for the ``with`` block. Blocks can be nested."""
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
            # Views and tied weights share one storage, which moves once.
            storages = [local_part(tensor).untyped_storage() for tensor in self._tensors()]
            distinct = {storage.data_ptr(): storage for storage in storages if len(storage)}
            self._on_host = [(storage, _copy_on_host(storage)) for storage in distinct.values()]
        on_gpu = any(storage.device.type == "cuda" for storage, _ in self._on_host)
        if on_gpu:
            # Other streams, such as FSDP's, may still read what is freed next.
            torch.cuda.synchronize()
        for storage, _ in self._on_host:
            storage.resize_(0)
        if on_gpu:
            torch.cuda.empty_cache()


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, without a gradient."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_offloaded(tensor: Tensor) -> bool:
    """Whether an :class:`Offloaded` currently holds the tensor's values on the host."""
    local = local_part(tensor)
    return local.numel() > 0 and len(local.untyped_storage()) == 0


def require_loaded(tensors: Iterable[Tensor]) -> None:
    """Raise ``RuntimeError`` if any of a model's tensors is currently offloaded."""
    if any(map(is_offloaded, tensors)):
        raise RuntimeError("the model is offloaded to the host's memory; use it inside `with ....loaded():`")


def reshard(model: nn.Module) -> None:
    """Free the full parameters that a forward pass without a backward leaves at the root of a sharded model."""
    if isinstance(model, FSDPModule):
        model.reshard()


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a loaded tensor from all ranks, without a gradient; all must call it together."""
    require_loaded([tensor])
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else local_part(tensor)  # type: ignore[attr-defined]  # detach keeps the class


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _copy_on_host(storage: UntypedStorage) -> list[Tensor]:
    """Copy the bytes of ``storage`` in pieces of :func:`piece_sizes`."""
    # A GPU copies page-locked memory at full speed, and while the CPU continues.
    pinned = storage.device.type == "cuda"
    parts = _bytes_of(storage).split(piece_sizes(len(storage)))
    pieces = [torch.empty(len(part), dtype=torch.uint8, pin_memory=pinned) for part in parts]
    return [piece.copy_(part, non_blocking=True) for piece, part in zip(pieces, parts, strict=True)]


def piece_sizes(num_bytes: int) -> list[int]:
    """Sizes that add up to ``num_bytes``: powers of two, and last what is less than ``SMALLEST_PIECE``.

    torch rounds page-locked memory up to a power of two: in one piece up to half of it would be lost.
    """
    sizes = []
    while num_bytes >= SMALLEST_PIECE:
        sizes.append(1 << (num_bytes.bit_length() - 1))
        num_bytes -= sizes[-1]
    return [*sizes, num_bytes] if num_bytes else sizes
