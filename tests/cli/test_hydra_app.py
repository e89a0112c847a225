"""The command line of the entry points: quick answers, and one line for what is wrong."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"torch", "vllm", "ray", "transformers"}


def run_main(folder: Path, module: str, *arguments: str) -> tuple[int, str, list[str], set[str]]:
    """Run an entry point in ``folder``: exit code, stdout, lines of stderr, and the top-level packages it imported."""
    command = [sys.executable, "-X", "importtime", "-m", f"verl.trainer.{module}", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    imported, errors = set(), []
    for line in result.stderr.splitlines():
        if line.startswith("import time:"):
            imported.add(line.rpartition("|")[2].strip().partition(".")[0])
        else:
            errors.append(line)
    assert "hydra" in imported  # else the import log was misread, and no heavy import would ever be seen
    return result.returncode, result.stdout, errors, imported


def test_the_entry_point_takes_verls_options(tmp_path: Path):
    options = ["actor_rollout_ref.rollout.n=5", "algorithm.adv_estimator=grpo", "trainer.critic_warmup=0"]
    code, output, errors, imported = run_main(tmp_path, "main_ppo", *options, "--cfg", "job")
    notes = "note: a command of veRL's: options that it leaves out have veRL's defaults, preset=verl"
    assert (code, errors) == (0, [notes])
    assert "\n  train_batch_size: 1024\n" in output and "\n  'n': 5\n" in output
    assert imported & HEAVY == set()


@pytest.mark.parametrize(
    ("module", "name"), [("main_ppo", "train.sh"), ("main_eval", "eval.sh"), ("main_sft", "main_sft")]
)
def test_help_begins_with_examples_and_pages(tmp_path: Path, module: str, name: str):
    code, output, _, imported = run_main(tmp_path, module, "--help")
    first = "\n".join(output.splitlines()[:15])
    assert code == 0 and imported & HEAVY == set()
    assert f"{name} model.path=" in first and "TRAINING_CONFIG.md" in first and "--cfg job" in first


@pytest.mark.parametrize(
    ("module", "argument", "message"),
    # One of each kind; tests/config/refusals.txt and tests/cli have the others.
    [
        ("main_ppo", "trainer.critic_warmup=2", "trainer.critic_warmup=2: grpo has no critic; set it to 0"),
        ("main_ppo", "--rolout_n=4", "--rolout_n: unknown flag; did you mean --rollout_n?"),
        ("main_eval", "n_samplng=3", "n_samplng: unknown key; did you mean n_sampling?"),
    ],
)
def test_a_wrong_config_ends_the_run_at_once_in_one_line(tmp_path: Path, module: str, argument: str, message: str):
    code, output, errors, imported = run_main(tmp_path, module, argument)
    assert (code, output, errors) == (1, "", [f"error: {message}"])
    assert imported & HEAVY == set()
    assert list(tmp_path.iterdir()) == []  # nothing is left behind, no log of Hydra's either
