"""The shell scripts: they parse, they refuse what they cannot do in one line, and they leave nothing half made."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
