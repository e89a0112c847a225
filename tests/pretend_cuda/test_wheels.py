"""The plugin against vLLM's wheels for CUDA, whose Python runs without a GPU as far as it is looked at here."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

VERSIONS = ["0.24.0", "0.28.0", "0.32.0", "0.33.0"]
"""The ends of the supported range, the pinned version, and one between."""
RUNNER = "vllm/v1/worker/gpu_model_runner.py"

pytestmark = [pytest.mark.nightly, pytest.mark.pretend_cuda]


@pytest.fixture(scope="session")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The Python files of each version; the wheels are those in ``$VERL_TEST_WHEELS``, or are downloaded by pip."""
    given = os.environ.get("VERL_TEST_WHEELS")
    wheels, folders = Path(given or tmp_path_factory.mktemp("wheels")), {}
    for version in VERSIONS:
        if not list(wheels.glob(f"vllm-{version}-*.whl")):
            download = [*"-m pip download --no-deps --only-binary :all:".split(), f"vllm=={version}"]
            done = subprocess.run(
                [sys.executable, *download, "-d", wheels], capture_output=True, text=True, timeout=580
            )
            if done.returncode:
                pytest.skip(f"pip finds no wheel of vLLM {version}: {done.stderr.strip().splitlines()[-1:]}")
        folders[version] = tmp_path_factory.mktemp(version)
        with zipfile.ZipFile(next(wheels.glob(f"vllm-{version}-*.whl"))) as wheel:
            kept = [n for n in wheel.namelist() if n.endswith((".py", ".json", "METADATA", "entry_points.txt"))]
            wheel.extractall(folders[version], kept)
    return folders


def looked_at(folder: Path) -> dict[str, Any]:
    """What ``wheel.py`` says of an unpacked wheel."""
    command = [sys.executable, "-I", Path(__file__).with_name("wheel.py"), folder]
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_wheel_has_what_the_plugin_and_the_rollout_rely_on(unpacked: dict[str, Path], version: str):
    assert looked_at(unpacked[version]) == {"version": version, "supported": True, "missing": [], "raised": ""}


def test_attribute_that_a_wheel_lacks_is_named(unpacked: dict[str, Path], tmp_path: Path):
    folder = shutil.copytree(unpacked["0.32.0"], tmp_path / "changed")
    source = (folder / RUNNER).read_text()
    (folder / RUNNER).write_text(source.replace("discard_request_mask", "renamed_mask"))
    place = "vllm.v1.worker.gpu_model_runner:GPUModelRunner.discard_request_mask"
    assert looked_at(folder)["missing"] == [place]
