"""eval.sh: what its settings and arguments become, and what it makes beforehand."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]

FAKE_PYTHON = """#!/usr/bin/env bash
printf '%s\\n' "call: $*" >>calls
"""

DATA = "scripts/prepare_data.py arithmetic --out data/arithmetic"
MODEL = "scripts/make_tiny_model.py --out data/tiny_model --data data/arithmetic"
JOB = "-m verl.trainer.main_eval"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder in which eval.sh finds an environment that runs nothing, and neither data nor model."""
    shutil.copy(ROOT / "eval.sh", tmp_path)
    for name, text in {"scripts/setup.sh": "", ".venv/bin/python": FAKE_PYTHON}.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def evaluate(checkout: Path, *args: str, **settings: str) -> tuple[int, list[str], str]:
    """Run eval.sh with settings changed at its top: exit code, what it had Python do, stderr."""
    script = checkout / "eval.sh"
    text = script.read_text()
    end_of_settings = '\ncd "$(dirname'
    assert text.count(end_of_settings) == 1
    assert all(f"{name}=" in text.partition(end_of_settings)[0] for name in settings)
    changes = "".join(f"{name}={value}\n" for name, value in settings.items())
    script.write_text(text.replace(end_of_settings, f"\n{changes}{end_of_settings}"))
    environment = {name: value for name, value in os.environ.items() if name != "ACTIVE_CONFIG_SET"}
    result = subprocess.run(["bash", script, *args], env=environment, capture_output=True, text=True, timeout=60)
    calls = checkout / "calls"
    lines = calls.read_text().splitlines() if calls.exists() else []
    return result.returncode, [line.removeprefix("call: ") for line in lines], result.stderr


@pytest.mark.parametrize(
    ("args", "calls"),
    [
        ([], [DATA, MODEL, f"{JOB} evaluation=embedded"]),
        (["n_sampling=4"], [DATA, MODEL, f"{JOB} evaluation=embedded n_sampling=4"]),
        (["evaluation=embedded", "model.path=x"], [DATA, MODEL, f"{JOB} evaluation=embedded model.path=x"]),
        (["evaluation=FULL_PASS1", "model.path=x"], [f"{JOB} evaluation=FULL_PASS1 model.path=x"]),
        (["model.path=x", "benchmarks=a,b", "n_sampling=16"], [f"{JOB} model.path=x benchmarks=a,b n_sampling=16"]),
        (["runs.A=x", "benchmarks=a"], [f"{JOB} runs.A=x benchmarks=a"]),
        (["++runs.A.path=x", "benchmarks=a"], [f"{JOB} ++runs.A.path=x benchmarks=a"]),
        (["--cfg", "job"], [f"{JOB} evaluation=embedded --cfg job"]),
    ],
)
def test_arguments(args: list[str], calls: list[str], checkout: Path):
    assert evaluate(checkout, *args) == (0, calls, "")


def test_the_embedded_data_and_model_are_made_once(checkout: Path):
    for name in ("data/arithmetic/sft_val.parquet", "data/tiny_model/config.json"):
        (checkout / name).parent.mkdir(parents=True)
        (checkout / name).touch()
    assert evaluate(checkout) == (0, [f"{JOB} evaluation=embedded"], "")


RUNS = {
    "RUN_NAME_MAP": '([b]=outputs/b [a]="outputs/it\'s a")',
    "BASE_MODEL_MAP": "([a]=Qwen/Qwen2.5-7B)",
    "STEP_MAP": "([b]=0,120,160)",
    "TEMPLATE_MAP": "([b]=abel)",
    "MAX_RESPONSE_LENGTH_MAP": "([a]=1024)",
}


def test_settings_become_overrides(checkout: Path):
    settings = {"ACTIVE_CONFIG_SET": "FULL_PASS1", "DEFAULT_TEMPLATE": "qwen-boxed", **RUNS}
    first = r"++runs.a.path='outputs/it\'s a' ++runs.a.base='Qwen/Qwen2.5-7B' ++runs.a.steps=[0,-1]"
    first += " ++runs.a.template=qwen-boxed ++runs.a.max_response_length=1024"
    second = "++runs.b.path='outputs/b' ++runs.b.steps=[0,120,160] ++runs.b.template=abel"
    expected = f"{JOB} evaluation=FULL_PASS1 {first} {second} seed=3"
    assert evaluate(checkout, "seed=3", **settings) == (0, [expected], "")


def test_aliases_choose_runs_and_their_order(checkout: Path):
    names = {"RUN_NAME_MAP": RUNS["RUN_NAME_MAP"]}
    _, (call,), _ = evaluate(checkout, "benchmarks=x", RUN_ALIASES="(b a)", **names)
    assert call.startswith(f"{JOB} ++runs.b.path='outputs/b' ++runs.b.steps=[0,-1] ++runs.a.path=")


def test_other_settings(checkout: Path):
    settings = {"TEMPERATURES": "0.6,1.0", "TOP_P": "0.9", "N_SAMPLING": "8", "CALCULATE_METRICS": "true"}
    expected = "temperatures=[0.6,1.0] top_p=0.9 n_sampling=8 calculator.enable=true calculator.diff_stride=20"
    _, calls, _ = evaluate(checkout, USE_WANDB="true", **settings)
    assert calls[-1] == f"{JOB} evaluation=embedded {expected} trainer.logger=[console,wandb]"


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"RUN_ALIASES": "(a)"}, "eval.sh: RUN_ALIASES names a, which has no entry in RUN_NAME_MAP; add one\n"),
        (
            {"RUN_NAME_MAP": "([a]=x)", "STEP_MAP": "([aa]=3)"},
            "eval.sh: STEP_MAP names aa, which has no entry in RUN_NAME_MAP; add one\n",
        ),
        # Hydra takes the dot for a level of options.
        (
            {"RUN_NAME_MAP": "([Qwen2.5-7B]=x)"},
            "eval.sh: RUN_NAME_MAP names Qwen2.5-7B: a letter, then letters, digits, _ and - only\n",
        ),
        ({"USE_WANDB": "False"}, "eval.sh: USE_WANDB=False: must be true or false\n"),
        ({"CALCULATE_METRICS": "1"}, "eval.sh: CALCULATE_METRICS=1: must be true or false\n"),
    ],
)
def test_settings_that_cannot_be_are_named(settings: dict[str, str], line: str, checkout: Path):
    assert evaluate(checkout, **settings) == (1, [], line)


def test_an_override_as_written_is_what_the_config_reads(checkout: Path):
    from tests.evaluation.fakes import evaluation_config

    _, (call,), _ = evaluate(checkout, "benchmarks=x", RUN_NAME_MAP='([a]="outputs/it\'s a/b=c")')
    overrides = call.removeprefix(f"{JOB} ").removesuffix(" benchmarks=x")
    path, steps = overrides.split(" ++runs.a.steps=")
    assert evaluation_config(path, f"++runs.a.steps={steps}").runs["a"].path == "outputs/it's a/b=c"
