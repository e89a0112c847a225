"""Compiles ``cuda_stub.cpp`` and loads it. Importing this module before torch gives a build for CPUs a CUDA device."""

import ctypes
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

STUB = "VERL_CUDA_STUB"
"""Environment variable with the path of the compiled library."""


def torch_folder() -> Path:
    """Where torch is installed; it is not imported."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def compile_stub(folder: Path) -> Path:
    """The library, compiled into ``folder`` in seconds.

    Raises:
        OSError, subprocess.CalledProcessError: there is no g++, or it does not compile.
    """
    torch, library = torch_folder(), folder / "libcuda_stub.so"
    includes = [f"-I{torch / 'include'}", f"-I{torch / 'include' / 'torch' / 'csrc' / 'api' / 'include'}"]
    links = [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu"]
    command = ["g++", "-O1", "-fPIC", "-shared", "-std=c++20", *includes, Path(__file__).with_name("cuda_stub.cpp")]
    subprocess.run([*command, "-o", library, *links], check=True, capture_output=True, text=True)
    return library


def load_stub() -> None:
    """Load the library, and with it torch's own, which then find the device as they start."""
    assert "torch" not in sys.modules, "the stub must come before torch"
    libraries = torch_folder() / "lib"
    for path in (*libraries.glob("libgomp*"), libraries / "libc10.so", libraries / "libtorch_cpu.so"):
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(os.environ[STUB], mode=ctypes.RTLD_GLOBAL)


if STUB in os.environ:
    load_stub()
