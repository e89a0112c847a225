"""The stub of a CUDA device, compiled once."""

import os
import subprocess

import pytest

from tests.conftest import ROOT, unavailable
from tests.pretend_cuda import stub


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that has the stub device."""
    try:
        library = stub.compile_stub(tmp_path_factory.mktemp("stub"))
    except (OSError, subprocess.CalledProcessError) as error:
        what = f"the stub of a CUDA device does not compile: {getattr(error, 'stderr', '') or error}"
        unavailable(what)
    return os.environ | {stub.STUB: str(library), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
