"""The shell scripts: they refuse in one line, leave nothing half made, and pass on what they were given."""

import fcntl
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from tests.evaluation.example_tasks import evaluation_config

pytestmark = pytest.mark.slow


def run_setup(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run scripts/setup.sh with ``args`` from the repository root, with ``env`` on top of the environment."""
    command = ["bash", "scripts/setup.sh", *args]
    environment = {**os.environ, **env}
    return subprocess.run(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize(
    ("args", "python", "words"),
    [
        (["--gpus"], None, ["'--gpus'", "--help"]),
        (["--cpu", "--gpu"], None, ["--cpu", "--gpu"]),
        (["--venv"], None, ["--venv", "directory"]),
        (["--venv", "--dev"], None, ["--venv", "directory"]),
        (["--cpu", "--venv", "new"], "no-such-python", ["VERL_PYTHON=no-such-python"]),
        (["--cpu", "--venv", "new"], "false", ["VERL_PYTHON=false"]),
        (["--cpu", "--venv", "thesis"], None, ["thesis was not made by setup.sh"]),
    ],
)
def test_setup_refuses_in_one_line(args: list[str], python: str | None, words: list[str], tmp_path: Path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_text("years of work")
    places = [str(tmp_path / arg) if arg in ("new", "thesis") else arg for arg in args]
    result = run_setup(*places, **({"VERL_PYTHON": python} if python else {}))
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("setup.sh: ") and all(word in line for word in words), line
    files = [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")]
    assert sorted(files) == ["thesis", "thesis/thesis.tex"]


def test_environment_of_another_checkout_is_left_alone(tmp_path: Path):
    other = tmp_path / "other"
    (other / "scripts").mkdir(parents=True)
    (other / "scripts" / "setup.sh").touch()
    (other / ".venv").mkdir()
    stamp = f"mode=cpu\ndev=no\nroot={other}\npython=3.11\nrequirements=1 2\n"
    (other / ".venv" / ".verl-setup").write_text(stamp)
    (tmp_path / "venv").symlink_to(other / ".venv")
    for venv in (tmp_path / "venv", other / ".venv"):
        result = run_setup("--cpu", "--venv", str(venv))
        assert result.returncode == 1
        (line,) = result.stderr.splitlines()
        assert f"VERL_ENV={other}/.venv" in line and line.startswith(f"setup.sh: {venv} ")
    assert [path.name for path in (other / ".venv").iterdir()] == [".verl-setup"]
    assert (other / ".venv" / ".verl-setup").read_text() == stamp


def test_failed_installation_does_not_look_complete(tmp_path: Path):
    venv = tmp_path / "venv"
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull, "VERL_PYTHON": sys.executable}
    for _ in range(2):  # the second run starts again, it does not trust what the first one left
        result = run_setup("--cpu", "--venv", str(venv), **offline)
        assert result.returncode == 1 and "making" in result.stdout
        last = result.stderr.splitlines()[-1]
        assert last.startswith("setup.sh: pip finds no torch") and str(venv / "setup.log") in last, result.stderr
        assert not (venv / ".verl-setup").exists()
        assert "No matching distribution found" in (venv / "setup.log").read_text()


def test_interrupted_update_goes_on(tmp_path: Path):
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "python").symlink_to(sys.executable)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stamp = f"mode=cpu\ndev=yes\nroot={ROOT}\npython={version}\nrequirements=1 2\n"
    (tmp_path / "venv" / ".verl-setup.unfinished").write_text(stamp)
    (tmp_path / "venv" / "lib").touch()
    result = run_setup("--cpu", "--venv", str(tmp_path / "venv"), PIP_NO_INDEX="1", PIP_CONFIG_FILE=os.devnull)
    assert result.returncode == 1 and "bringing" in result.stdout and "removing" not in result.stdout
    # What was there stays, and so does the mark.
    assert (tmp_path / "venv" / "lib").exists()
    assert (tmp_path / "venv" / ".verl-setup.unfinished").read_text() == stamp


def test_concurrent_setups_wait_for_each_other(tmp_path: Path):
    # What each asks of NFS: a lock on a descriptor that may write.
    lock = ROOT / "scripts" / "setup.sh"
    before = lock.read_bytes()
    with lock.open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        command = ["bash", "scripts/setup.sh", "--cpu", "--venv", str(tmp_path / "venv")]
        offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
        waiting = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | offline, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert waiting.stdout is not None
        assert "waiting for another setup.sh to finish" in waiting.stdout.readline()
        (flags,) = re.findall(r"flags:\s+(\d+)", Path(f"/proc/{waiting.pid}/fdinfo/9").read_text())
        assert int(flags, 8) & os.O_ACCMODE == os.O_WRONLY
    waiting.communicate(timeout=120)
    assert waiting.returncode == 1 and lock.read_bytes() == before


ENVIRONMENTS = ("VERL_ENV", "VIRTUAL_ENV", "CONDA_PREFIX")


@pytest.mark.parametrize("variable", ENVIRONMENTS)
def test_environment_that_exists_is_used_as_it_is(variable: str, checkout: Path):
    """No pip and no .venv: setup.sh of this checkout would fail."""
    shutil.rmtree(checkout / ".venv")
    (checkout / "scripts" / "setup.sh").write_text("echo setup.sh >>calls; exit 1\n")
    calls = run(checkout / "train.sh", "--cfg", "job", **{variable: sys.prefix})
    assert calls[0] == 0 and calls[1] == [] and not (checkout / ".venv").exists()


def test_environment_that_lacks_packages(checkout: Path):
    bare = checkout / "bare"
    (bare / "bin").mkdir(parents=True)
    (bare / "bin" / "python").write_text(f'#!/bin/sh\nexec {sys._base_executable} -I "$@"\n')
    (bare / "bin" / "python").chmod(0o755)
    # Named, it is an error; active, a line says why it is not used.
    code, calls, errors = run(checkout / "train.sh", VERL_ENV=str(bare))
    assert (code, calls) == (1, []) and errors.startswith(f"VERL_ENV={bare}: ") and "missing" in errors
    code, calls, _ = run(checkout / "train.sh", VIRTUAL_ENV=str(bare))
    assert (code, calls) == (0, [TRAIN])
    assert run(checkout / "train.sh", VERL_ENV="/nowhere")[2] == "VERL_ENV=/nowhere: has no bin/python\n"


FAKE_PYTHON = """#!/usr/bin/env bash
# What it would run is only written down.
cd "$(dirname "$0")/../.."
printf '%s\\n' "$*" >>calls
printf '%s %s' "$OLDPWD" "$PYTHONPATH" >places
"""

TRAIN, EVALUATE = "-P -m verl.trainer.main_ppo", "-P -m verl.trainer.main_eval"
END_OF_SETTINGS = "\ncheckout=$(cd"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder in which train.sh and eval.sh find an environment that runs nothing."""
    for name, text in {"scripts/setup.sh": "", ".venv/bin/python": FAKE_PYTHON}.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    scripts = ("environment.sh", "cluster.sh", "check_environment.py")
    for script in ("train.sh", "eval.sh", *(f"scripts/{name}" for name in scripts)):
        shutil.copy(ROOT / script, tmp_path / script)
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    shutil.copy(ROOT / "requirements.txt", tmp_path)
    return tmp_path


def run(script: Path, *args: str, **variables: str) -> tuple[int, list[str], str]:
    """Run train.sh or eval.sh: exit code, what it had Python do, stderr."""
    foreign = ("HDFS_", "ACTIVE_CONFIG_SET", "RAY_ADDRESS", "NNODES", "SLURM_", *ENVIRONMENTS)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    environment |= {"PYTHONPATH": str(ROOT)} | variables
    result = subprocess.run(["bash", script, *args], env=environment, capture_output=True, text=True, timeout=60)
    calls = script.parent / "calls"
    return result.returncode, calls.read_text().splitlines() if calls.exists() else [], result.stderr


def evaluate(checkout: Path, *args: str, **settings: str) -> tuple[int, list[str], str]:
    """Run eval.sh with settings changed at its top."""
    script = checkout / "eval.sh"
    text = script.read_text()
    assert text.count(END_OF_SETTINGS) == 1
    assert all(f"{name}=" in text.partition(END_OF_SETTINGS)[0] for name in settings)
    changes = "".join(f"{name}={value}\n" for name, value in settings.items())
    script.write_text(text.replace(END_OF_SETTINGS, f"\n{changes}{END_OF_SETTINGS}"))
    return run(script, *args)


@pytest.mark.parametrize(("script", "called"), [("train.sh", TRAIN), ("eval.sh", f"{EVALUATE} evaluation=embedded")])
def test_arguments_are_passed_on_from_any_folder(checkout: Path, script: str, called: str, monkeypatch):
    (checkout / "elsewhere").mkdir()
    monkeypatch.chdir(checkout / "elsewhere")
    arguments = ["--model_name", "a/b", "data.train_files=[a b]", "-m", "seed=1,2"]
    assert run(checkout / script, *arguments)[:2] == (0, [f"{called} {' '.join(arguments)}"])
    assert (checkout / "places").read_text() == f"{checkout}/elsewhere {checkout}:{ROOT}"


RUNS = {
    "RUN_NAME_MAP": '([b]=outputs/b [a]="outputs/it\'s a")',
    "BASE_MODEL_MAP": "([a]=Qwen/Qwen2.5-7B)",
    "STEP_MAP": "([b]=0,120,160)",
    "TEMPLATE_MAP": "([b]=abel)",
    "MAX_RESPONSE_LENGTH_MAP": "([a]=1024)",
    "DEFAULT_TEMPLATE": "qwen-boxed",
}
RUN_A = (
    r"++runs.a.path='outputs/it\'s a' ++runs.a.base='Qwen/Qwen2.5-7B' ++runs.a.steps=[0,-1] "
    "++runs.a.template=qwen-boxed ++runs.a.max_response_length=1024"
)
RUN_B = "++runs.b.path='outputs/b' ++runs.b.steps=[0,120,160] ++runs.b.template=abel"
SAMPLING = {"TEMPERATURES": "0.6,1.0", "TOP_P": "0.9", "N_SAMPLING": "8"}
SWITCHES = {"CALCULATE_METRICS": "true", "USE_WANDB": "true"}
SAYS_WHAT = ("+benchmarks=a", "++model.path=x", "model.base=x", "+model={path:x}", "runs.a=x", "++runs={a:x}")
SWITCHED_ON = "calculator.enable=true calculator.diff_stride=20 trainer.logger=[console,wandb]"


@pytest.mark.parametrize(
    ("args", "settings", "overrides"),
    [
        ("", {}, "evaluation=embedded"),
        ("n_sampling=4 --cfg job", {}, "evaluation=embedded n_sampling=4 --cfg job"),
        ("evaluation=FULL_PASS1 model.path=x", {}, "evaluation=FULL_PASS1 model.path=x"),
        ("evaluation=A", {"ACTIVE_CONFIG_SET": "B"}, "evaluation=A"),
        ("model.path=x benchmarks=a,b n_sampling=16", {}, "model.path=x benchmarks=a,b n_sampling=16"),
        # However an option is spelled, the embedded task is not evaluated beside it.
        *((option, {}, option) for option in SAYS_WHAT),
        ("seed=3", {"ACTIVE_CONFIG_SET": "FULL_PASS1", **RUNS}, f"evaluation=FULL_PASS1 {RUN_A} {RUN_B} seed=3"),
        # Aliases choose the runs and their order.
        ("benchmarks=x", {"RUN_ALIASES": "(b a)", **RUNS}, f"{RUN_B} {RUN_A} benchmarks=x"),
        ("evaluation=A", {"ACTIVE_CONFIG_SETS": "(B C)"}, "evaluation=A"),
        ("", {"ACTIVE_CONFIG_SETS": "(B C)", "ACTIVE_CONFIG_SET": "A"}, "evaluation=A"),
        ("seed=3", {"EVAL_SEED": "7"}, "evaluation=embedded seed=7 seed=3"),
        ("", SAMPLING, "evaluation=embedded temperatures=[0.6,1.0] top_p=0.9 n_sampling=8"),
        ("", SWITCHES, f"evaluation=embedded {SWITCHED_ON}"),
    ],
)
def test_eval_passes_on_settings_and_arguments(checkout: Path, args: str, settings: dict[str, str], overrides: str):
    assert evaluate(checkout, *args.split(), **settings) == (0, [f"{EVALUATE} {overrides}"], "")


def test_eval_evaluates_several_sets_one_after_another(checkout: Path):
    code, calls, _ = evaluate(checkout, "a=b c", ACTIVE_CONFIG_SETS="(A B)", **RUNS)
    assert (code, calls) == (0, [f"{EVALUATE} evaluation={name} {RUN_A} {RUN_B} a=b c" for name in "AB"])


ALIASES = "use a letter, then letters, digits, _ and -"


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"RUN_ALIASES": "(a)"}, "RUN_ALIASES: a is not in RUN_NAME_MAP; add it there"),
        ({"RUN_NAME_MAP": "([a]=x)", "STEP_MAP": "([aa]=3)"}, "STEP_MAP: aa is not in RUN_NAME_MAP; add it there"),
        # Hydra takes the dot for a level of options.
        ({"RUN_NAME_MAP": "([A-2.5]=x)"}, f"RUN_NAME_MAP: A-2.5 is not a valid alias; {ALIASES}"),
        ({"USE_WANDB": "False"}, "USE_WANDB=False: must be true or false"),
        ({"CALCULATE_METRICS": "1"}, "CALCULATE_METRICS=1: must be true or false"),
    ],
)
def test_eval_refuses_in_one_line(settings: dict[str, str], line: str, checkout: Path):
    assert evaluate(checkout, **settings) == (1, [], f"eval.sh: {line}\n")


def test_quoted_path_is_what_the_config_reads(checkout: Path):
    _, (call,), _ = evaluate(checkout, "benchmarks=x", RUN_NAME_MAP='([a]="outputs/it\'s a/b=c")')
    overrides = call.removeprefix(f"{EVALUATE} ").removesuffix(" benchmarks=x")
    path, steps = overrides.split(" ++runs.a.steps=")
    assert evaluation_config(path, f"++runs.a.steps={steps}").runs["a"].path == "outputs/it's a/b=c"
