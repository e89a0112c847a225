"""The shell scripts: they parse, they refuse what they cannot do in one line, and they leave nothing half made."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = [*sorted(ROOT.glob("*.sh")), *sorted((ROOT / "scripts").glob("*.sh")), ROOT / ".ci" / "run"]


def run_setup(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run scripts/setup.sh with ``args`` from the repository root, with ``env`` on top of the environment."""
    return subprocess.run(
        ["bash", "scripts/setup.sh", *args],
        cwd=ROOT,
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


def assert_one_line_error(result: subprocess.CompletedProcess[str], *words: str) -> None:
    assert result.returncode == 1, result
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("setup.sh: "), lines
    for word in words:
        assert word in lines[0], lines


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_script_parses(script: Path):
    result = subprocess.run(["bash", "-n", script], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


def test_unknown_argument():
    assert_one_line_error(run_setup("--gpus"), "'--gpus'", "--help")


def test_cpu_and_gpu_exclude_each_other():
    assert_one_line_error(run_setup("--cpu", "--gpu"), "--cpu", "--gpu")


@pytest.mark.parametrize("args", [("--venv",), ("--venv", "--dev")])
def test_venv_needs_a_directory(args: tuple[str, ...]):
    assert_one_line_error(run_setup(*args), "--venv", "directory")


def test_help_lists_the_options():
    result = run_setup("--help")
    assert result.returncode == 0
    for word in ("--cpu", "--gpu", "--dev", "--venv", "VERL_PYTHON"):
        assert word in result.stdout


def test_a_folder_of_someone_else_is_left_alone(tmp_path: Path):
    (tmp_path / "thesis.tex").write_text("years of work")
    assert_one_line_error(run_setup("--cpu", "--venv", str(tmp_path)), str(tmp_path), "not made by setup.sh")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("python", ["no-such-python", "false"])
def test_chosen_python_that_does_not_run(tmp_path: Path, python: str):
    venv = tmp_path / "venv"
    assert_one_line_error(run_setup("--cpu", "--venv", str(venv), VERL_PYTHON=python), f"VERL_PYTHON={python}")
    assert not venv.exists()


def test_failed_installation_does_not_look_complete(tmp_path: Path):
    venv = tmp_path / "venv"
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull, "VERL_PYTHON": sys.executable}
    for _ in range(2):  # the second run starts afresh, it does not believe what the first one left
        result = run_setup("--cpu", "--venv", str(venv), **offline)
        assert result.returncode == 1
        last = result.stderr.splitlines()[-1]
        assert last.startswith("setup.sh: pip finds no torch"), result.stderr
        assert str(venv / "setup.log") in last
        assert "making" in result.stdout
        assert not (venv / ".verl-setup").exists()
        assert "No matching distribution found" in (venv / "setup.log").read_text()


FAKE_PYTHON = f"""#!/usr/bin/env bash
# Translates as the real one; everything else is only written down.
if [[ $1 == -m && $2 == verl.cli.release_flags ]]; then
  exec {sys.executable} "$@"
fi
printf '%s\\n' "call: $*" >>calls
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder in which train.sh finds an environment that runs nothing, and neither data nor model."""
    shutil.copy(ROOT / "train.sh", tmp_path)
    for name, text in {"scripts/setup.sh": "", ".venv/bin/python": FAKE_PYTHON}.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def train(checkout: Path, *args: str) -> tuple[int, list[str], str]:
    """Run train.sh: exit code, what it had Python do, stderr."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HDFS_")}
    environment["PYTHONPATH"] = str(ROOT)
    command = ["bash", checkout / "train.sh", *args]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    calls = checkout / "calls"
    return result.returncode, calls.read_text().splitlines() if calls.exists() else [], result.stderr


DATA = "call: scripts/prepare_data.py arithmetic --out data/arithmetic"
MODEL = "call: scripts/make_tiny_model.py --out data/tiny_model --data data/arithmetic"


@pytest.mark.parametrize(
    ("args", "made", "overrides"),
    [
        ([], [DATA, MODEL], ""),
        (["-m", "seed=1,2"], [DATA, MODEL], " seed=1,2 -m"),
        (["model=tiny"], [DATA, MODEL], " model=tiny"),
        (["model=qwen2.5_7b"], [DATA], " model=qwen2.5_7b"),
        (["critic.model.path=x"], [DATA, MODEL], " critic.model.path=x"),
        (["data.train_files=[a b]"], [DATA, MODEL], " data.train_files=[a b]"),
        (["data.train_files=[a]", "model.path=b"], [], " data.train_files=[a] model.path=b"),
        (["--rollout_n", "4", "--cfg", "job"], [], " rollout.n=4 --cfg job"),
        (["--help"], [], " --help"),
        (
            ["--model_name", "a/b", "--dataset_name=c d"],
            [],
            " preset=paper model.path='a/b' data.train_files=['data/c d/train.parquet'] "
            "data.val_files=['data/c d/test.parquet']",
        ),
    ],
)
def test_train_makes_what_the_run_uses(checkout: Path, args: list[str], made: list[str], overrides: str):
    code, calls, _ = train(checkout, *args)
    assert code == 0
    assert calls == [*made, f"call: -m verl.trainer.main_ppo{overrides}"]


def test_train_ends_where_a_flag_is_unknown(checkout: Path):
    code, calls, errors = train(checkout, "--rolout_n", "4")
    assert (code, calls) == (2, [])
    assert errors == "error: --rolout_n: unknown flag; did you mean --rollout_n?\n"
