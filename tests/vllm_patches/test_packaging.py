"""The plugin can be installed by itself."""

import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import Distribution, entry_points
from pathlib import Path

from packaging.requirements import Requirement

from vllm_patches.compat import SUPPORTED

SOURCE = Path(__file__).parents[2] / "vllm_patches"


def test_it_is_complete_without_verl(tmp_path: Path):
    copy = shutil.copytree(SOURCE, tmp_path / "source", ignore=shutil.ignore_patterns("__pycache__", "build"))
    target = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--target", target, copy]
    subprocess.run(pip, check=True, capture_output=True)
    (metadata,) = target.glob("*.dist-info")
    (plugin,) = Distribution.at(metadata).entry_points
    assert (plugin.group, plugin.value) == ("vllm.general_plugins", "vllm_patches:register")
    assert sorted(path.name for path in (target / "vllm_patches").glob("*.py")) == sorted(
        path.name for path in SOURCE.glob("*.py")
    )


def test_verl_brings_it_along():
    plugins = [plugin for plugin in entry_points(group="vllm.general_plugins") if plugin.name == "verl_hidden_states"]
    assert {plugin.value for plugin in plugins} == {"vllm_patches:register"}


def test_both_name_the_same_versions_of_vllm():
    project = tomllib.loads((SOURCE / "pyproject.toml").read_text())["project"]
    (vllm,) = [r for r in map(Requirement, project["dependencies"]) if r.name == "vllm"]
    assert vllm.specifier == SUPPORTED
