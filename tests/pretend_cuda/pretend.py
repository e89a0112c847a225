"""Tensors that claim to be on a GPU and hold real numbers on the CPU.

Within ``pretend_cuda()`` the device ``cuda`` exists. What a GPU would refuse raises, as an operation on tensors of two
devices does; where the host would wait for the device, the wait is counted with the line that caused it; and numbers
that travel to the host without a wait are not there before their event has been looked at.
"""

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from tests.pretend_cuda import stub, varlen

ROOT = Path(__file__).resolve().parents[2]
OURS = tuple(f"{ROOT / name}/" for name in ("verl", "vllm_patches"))
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
aten = torch.ops.aten

FETCHES = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default}
"""Operations whose result is a number on the host."""
WAITS = FETCHES | {
    *(aten.nonzero.default, aten.masked_select.default, aten.bincount.default, aten.repeat_interleave.Tensor),
    *(aten._unique2.default, aten.unique_dim.default, aten.unique_consecutive.default),
    aten._linalg_check_errors.default,
}
"""Operations after which the host knows a number or a size that the device has computed."""
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
COPIES = {aten._to_copy.default, aten.copy_.default, aten._copy_from.default}
TAKE_NO_HOST_SCALAR = set("cat stack gather index_select scatter bmm mm addmm baddbmm embedding".split())
"""Operations that refuse even a tensor on the CPU that holds a single number; others take it for a Python number."""


class Place(NamedTuple):
    """The innermost line of the project that was running."""

    file: str
    function: str
    line: int


class Pretend(Tensor):
    """A tensor whose device is ``cuda:0`` and whose numbers are those of ``elem``, on the CPU."""

    elem: Tensor

    @staticmethod
    def __new__(cls: type["Pretend"], elem: Tensor, requires_grad: bool = False) -> "Pretend":
        assert not isinstance(elem, Pretend)
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            elem.size(),
            strides=elem.stride(),
            storage_offset=elem.storage_offset(),
            dtype=elem.dtype,
            layout=elem.layout,
            device=CUDA,
            requires_grad=requires_grad,
        )
        made.elem = elem
        return made  # type: ignore[no-any-return]

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Autograd's threads have no mode of their own.
        return GPU.running().run(func, args, kwargs or {})

    def __repr__(self, *_: Any, **__: Any) -> str:
        return f"Pretend({self.elem!r})"

    def tolist(self) -> Any:
        GPU.running().wait("tolist")
        return self.elem.tolist()

    def untyped_storage(self) -> Any:
        return Storage(self.elem.untyped_storage())

    def set_(self, *source: Any, **_: Any) -> Any:
        return Pretend(self.elem.set_(source[0].storage))

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")

    __array__ = numpy


def on_host(value: Any) -> Any:
    """The tensor behind a pretended one, anything else as it is. It is read without being counted."""
    return value.elem if isinstance(value, Pretend) else value


class Storage:
    """Memory of the device, which raises if it is freed while the device may still be reading it."""

    device = CUDA

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage
        self.data_ptr = storage.data_ptr

    def __len__(self) -> int:
        return len(self.storage)

    def resize_(self, size: int) -> None:
        if size < len(self) and GPU.running().is_busy:
            raise RuntimeError("memory was freed without torch.cuda.synchronize()")
        self.storage.resize_(size)


class GPU(TorchDispatchMode):
    """The device: runs every operation on the CPU and keeps count."""

    current: "GPU | None" = None

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[tuple[str, Place]] = Counter()
        self.operations = 0
        self.is_busy = False
        """Whether there were operations after the host last waited for all streams."""
        self.flying: list[tuple[Tensor, Tensor]] = []
        """Copies to the host that nobody has waited for: where to, and what."""
        self._pinned: dict[int, Tensor] = {}

    @classmethod
    def running(cls) -> "GPU":
        assert cls.current is not None, "a pretended tensor outside pretend_cuda()"
        return cls.current

    def __enter__(self) -> "GPU":
        GPU.current = self
        # torch.tensor(..., device="cuda") then shows as a copy from the host, which it is.
        self._lifts = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        torch._C._set_only_lift_cpu_tensors(self._lifts)
        super().__exit__(*error)
        GPU.current = None

    def wait(self, kind: str) -> None:
        """The host waits for the device here, and everything that was on its way to it has arrived."""
        self.waits[kind, _place()] += 1
        self.land(self.flying)

    def synchronize(self) -> None:
        """The host waits for all streams."""
        self.wait("cuda.synchronize")
        self.is_busy = False

    def land(self, copies: list[tuple[Tensor, Tensor]]) -> None:
        """Let copies arrive."""
        for target, values in copies:
            target.copy_(values)
        self.flying = [copy for copy in self.flying if not any(copy is landed for landed in copies)]

    def pin(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor in what counts as page-locked memory."""
        if isinstance(tensor, Pretend):
            raise RuntimeError("cannot pin 'torch.cuda' tensor: only dense CPU tensors can be pinned")
        pinned = tensor.clone()
        self._pinned[pinned.untyped_storage().data_ptr()] = pinned  # held, so that the address stays its own
        return pinned

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """One operation, as a GPU would have it."""
        flat, spec = tree_flatten((args, kwargs))
        here = [value for value in flat if isinstance(value, Pretend)]
        there = [value for value in flat if isinstance(value, Tensor) and not isinstance(value, Pretend)]
        asked = None if kwargs.get("device") is None else torch.device(kwargs["device"])
        if not here and (asked is None or asked.type != "cuda"):
            wants_pinned = kwargs.pop("pin_memory", None)
            made = func(*args, **kwargs)
            return self.pin(made) if wants_pinned else made
        self.operations += 1
        self.is_busy = True
        name = func._schema.name.partition("::")[2]
        if name in VARLEN:
            return tree_map(_pretended, VARLEN[name](*map(on_host, args), **tree_map(on_host, kwargs)))
        if func in COPIES:
            return self._copy(func, args, kwargs, asked)
        if any(isinstance(value, torch.Generator) and value.device.type == "cpu" for value in flat):
            raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
        self._check_devices(func, name, args, here, there)
        self._count(func, name, args, kwargs)
        clean = [CPU if isinstance(v, torch.device) and v.type == "cuda" else on_host(v) for v in flat]
        plain_args, plain_kwargs = tree_unflatten(clean, spec)
        plain_kwargs.pop("pin_memory", None)
        if func is aten.histc.default and not plain_args[0].is_floating_point():
            # Of integers a GPU alone has it.
            result = func(plain_args[0].double(), *plain_args[1:], **plain_kwargs).to(plain_args[0].dtype)
        else:
            result = func(*plain_args, **plain_kwargs)
        if func in FETCHES:
            return result
        # What an operation returns of its arguments stays the same object.
        same = {id(value.elem): value for value in here} | {id(value): value for value in there}
        return tree_map(lambda v: same.get(id(v), _pretended(v)) if isinstance(v, Tensor) else v, result)

    def _check_devices(self, func: Any, name: str, args: Any, here: list[Pretend], there: list[Tensor]) -> None:
        """Raise ``RuntimeError`` as torch does for tensors of two devices."""
        if func in INDEXING:
            if not isinstance(args[0], Pretend):
                raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
            there = [value for value in there if len(args) > 2 and value is args[2]]
        refused = [value for value in there if value.dim() or name in TAKE_NO_HOST_SCALAR]
        if here and refused:
            shapes = [tuple(value.shape) for value in refused]
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu: "
                f"{name} with tensors {shapes} on the CPU"
            )

    def _count(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> None:
        if func in INDEXING:
            for index in args[1]:
                if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8):
                    self.wait("index by a mask")
                elif isinstance(index, Tensor) and not isinstance(index, Pretend):
                    self.wait("index on the host")
        elif func in WAITS and not (name == "repeat_interleave" and kwargs.get("output_size") is not None):
            self.wait(name)

    def _copy(self, func: Any, args: Any, kwargs: dict[str, Any], asked: torch.device | None) -> Any:
        """A copy, whose host waits unless the memory on its side is page-locked and the copy is asked not to block."""
        into = args[0] if func is aten.copy_.default else None
        source = args[1] if into is not None else args[0]
        asynchronous = kwargs.get("non_blocking") or (into is not None and len(args) > 2 and args[2])
        to_gpu = isinstance(into, Pretend) if into is not None else (asked or source.device).type == "cuda"
        plain = {name: value for name, value in kwargs.items() if name not in ("device", "non_blocking", "pin_memory")}
        values = source if isinstance(source, Tensor) else torch.as_tensor(source)
        from_gpu, values = isinstance(values, Pretend), on_host(values)
        if from_gpu == to_gpu:
            made = on_host(into).copy_(values) if into is not None else func(values, **plain)
            return into if into is not None else (_pretended(made) if to_gpu else made)
        if to_gpu:
            # A kernel's argument, not a copy: torch reads the single number on the host.
            if not (into is not None and values.dim() == 0) and not (asynchronous and self.is_pinned(values)):
                self.wait("to the device")
            if into is not None:
                into.elem.copy_(values)
                return into
            return Pretend(func(values, **plain).clone())
        target = into if into is not None else func(values, **plain).clone()
        if not asynchronous or (into is not None and not self.is_pinned(into)):
            self.wait("to the host")
            target.copy_(values)
            return target
        if into is None:
            target = self.pin(target)  # as torch does for a copy that does not block
        self.flying.append((target, target.clone().copy_(values)))
        target.fill_(torch.nan if target.is_floating_point() else target.dtype == torch.bool or 77)
        return target


VARLEN: dict[str, Callable[..., Any]] = {"_varlen_attn": varlen.forward, "_varlen_attn_backward": varlen.backward}


def _pretended(value: Any) -> Any:
    return Pretend(value) if isinstance(value, Tensor) and not isinstance(value, Pretend) else value


def _place() -> Place:
    frame: Any = sys._getframe(1)
    while frame is not None:
        file, code = frame.f_code.co_filename, frame.f_code
        if file.startswith(OURS):
            return Place(str(Path(file).relative_to(ROOT)), code.co_qualname, frame.f_lineno)
        frame = frame.f_back
    return Place("-", "autograd or a library", 0)


class Event:
    """An event of the one stream: it has happened, and what flew when it was recorded lands when it is looked at."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._flying: list[tuple[Tensor, Tensor]] = []

    def record(self, *_: Any) -> None:
        self._flying = list(GPU.running().flying)

    def query(self) -> bool:
        GPU.running().land(self._flying)
        return True

    def wait(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        gpu = GPU.running()
        # Who has seen what flew arrive knows that the event has happened.
        if not self._flying or any(copy is flying for copy in self._flying for flying in gpu.flying):
            gpu.wait("event.synchronize")

    def elapsed_time(self, _: "Event") -> float:
        return 0.0


class Stream:
    """The one stream."""

    priority = stream_id = cuda_stream = device_index = 0
    device_type, device = 1, CUDA

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, *_: Any) -> None:
        pass

    wait_event = wait_stream

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record()
        return event

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        GPU.running().wait("stream.synchronize")


@contextmanager
def _on_stream(_: Any) -> Iterator[None]:
    yield


STREAM = Stream()
OF_TORCH_CUDA: dict[str, Any] = {
    **{"Stream": Stream, "Event": Event, "stream": _on_stream},
    **{name: lambda *_: STREAM for name in ("current_stream", "default_stream")},
    **{name: lambda *_: None for name in ("empty_cache", "set_device", "_lazy_init")},
    **{name: lambda *_: True for name in ("is_available", "is_initialized")},
    **{"current_device": lambda: 0, "device_count": lambda: 1, "get_device_capability": lambda *_: (9, 0)},
    **{"is_current_stream_capturing": lambda: False, "mem_get_info": lambda *_: (70 << 30, 80 << 30)},
    "synchronize": lambda *_: GPU.running().synchronize(),
}
"""What stands in for the names of ``torch.cuda``."""


@contextmanager
def pretend_cuda() -> Iterator[GPU]:
    """Within, the device ``cuda`` exists; the result keeps count of what happens on it."""
    assert stub.STUB in os.environ, "needs the stub, see tests/pretend_cuda/stub.py"
    with ExitStack() as stack:
        for name, value in OF_TORCH_CUDA.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(Tensor, "pin_memory", lambda t, *_: GPU.running().pin(t)))
        stack.enter_context(mock.patch.object(Tensor, "is_pinned", lambda t, *_: GPU.running().is_pinned(t)))
        yield stack.enter_context(GPU())
