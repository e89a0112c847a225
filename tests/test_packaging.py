"""The package installed from a wheel, without the checkout beside it."""

import os
import shutil
import subprocess
import sys
from importlib.metadata import Distribution
from pathlib import Path

import pytest
from conftest import ROOT

pytestmark = pytest.mark.slow

PACKAGES = ("verl", "verl_pages", "vllm_patches")
SOURCES = (*PACKAGES, "configs", "requirements", "setup.py", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like site-packages. Built from a copy, as a build leaves files where it runs."""
    folder = tmp_path_factory.mktemp("package")
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "build"))
        else:
            shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--target", folder / "site"]
    subprocess.run([*pip, source], check=True, capture_output=True)
    return folder / "site"


def files_below(folder: Path) -> set[str]:
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {str(path) for path in paths if "__pycache__" not in path.parts}


def test_every_file_and_entry_point_is_there(installed: Path):
    assert files_below(ROOT / "verl") <= files_below(installed / "verl")
    assert files_below(ROOT / "verl_pages") == files_below(installed / "verl_pages")
    assert files_below(ROOT / "configs") == files_below(installed / "verl" / "configs")
    (metadata,) = installed.glob("verl_rank-*.dist-info")
    points = Distribution.at(metadata).entry_points.select(group="console_scripts")
    modules = {"train": "main_ppo", "sft": "main_sft", "eval": "main_eval", "export": "main_export"}
    modules["analysis"] = "main_analysis"
    expected = {f"verl-{name}": f"verl.trainer.{module}:main" for name, module in modules.items()}
    expected["verl-report"] = "verl_pages.command:main"
    assert {point.name: point.value for point in points} == expected


def test_it_finds_its_configs(installed: Path, tmp_path: Path):
    command = [sys.executable, "-m", "verl.trainer.main_eval", "evaluation=TINY_SAMPLES_PASS256", "model.path=a/b"]
    environment = os.environ | {"PYTHONPATH": str(installed)}
    result = subprocess.run([*command, "--cfg", "job"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "n_sampling: 256" in result.stdout
