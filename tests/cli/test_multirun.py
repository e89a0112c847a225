"""Sweeps: ``-m`` runs every combination, each in a folder of its own, and a job that fails ends them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from verl.config import PPOConfig, load_config

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]

FAKE = """
from verl.cli.hydra_app import run_hydra
from verl.config.load import parse_config
from verl.config.ppo import PPOConfig

def run(config):
    trainer = config.trainer
    print("job", config.reward_manager.hypothesis_type, trainer.experiment_name, trainer.default_local_dir)
    if config.seed == 9:
        raise SystemExit("error: nine")

run_hydra("ppo_trainer", PPOConfig, lambda tree: parse_config(PPOConfig, tree), run)
"""
"""A main job that trains nothing."""


def sweep(folder: Path, *arguments: str) -> tuple[int, list[list[str]], str]:
    """Run the fake job in ``folder``: exit code, what each job printed, stderr."""
    (folder / "fake.py").write_text(FAKE)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "fake.py", *arguments]
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    jobs = [line.split()[1:] for line in result.stdout.splitlines() if line.startswith("job ")]
    if len(jobs) > 1 and result.returncode == 0:
        page = os.path.commonpath([job[2] for job in jobs])
        assert result.stdout.splitlines()[-1] == f"the {len(jobs)} runs on one page: verl-report {page}"
    return result.returncode, jobs, result.stderr


def test_every_job_has_its_own_folder(tmp_path: Path):
    kinds = "reward_manager.hypothesis_type=PlanB,FixTwo,FixOne"
    code, jobs, _ = sweep(tmp_path, "-m", kinds, "trainer.experiment_name=${reward_manager.hypothesis_type}")
    assert code == 0
    (home,) = (tmp_path / "outputs" / "verl" / "multirun").iterdir()
    assert jobs == [[name, name, str(home / str(i))] for i, name in enumerate(["PlanB", "FixTwo", "FixOne"])]
    # The folders are new and empty, as a run demands, and nothing lies anywhere else.
    assert sorted(path.name for path in home.iterdir()) == ["0", "1", "2", "multirun.yaml"]
    assert not any(path for job in "012" for path in (home / job).iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fake.py", "outputs"]


def test_folder_of_a_sweep_has_one_per_job(tmp_path: Path):
    code, jobs, errors = sweep(tmp_path, "-m", "seed=1,2", "trainer.default_local_dir=mine")
    assert (code, errors, [job[2] for job in jobs]) == (0, "", [f"{tmp_path}/mine/{i}" for i in (0, 1)])
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == ["0", "1", "multirun.yaml"]


def test_failed_job_ends_the_sweep(tmp_path: Path):
    code, jobs, errors = sweep(tmp_path, "seed=1,9,2", "trainer.default_local_dir=mine/${seed}", "--multirun")
    assert (code, errors, [job[2] for job in jobs]) == (1, "error: nine\n", ["mine/1", "mine/9"])


def test_jobs_side_by_side(tmp_path: Path):
    launcher = ["hydra/launcher=submitit_local", "hydra.launcher.timeout_min=1"]
    code, _, errors = sweep(tmp_path, "-m", "seed=1,2", *launcher)
    assert code == 0, errors
    (home,) = (tmp_path / "outputs" / "verl" / "multirun").iterdir()
    logs = [path.read_text() for path in home.glob(".submitit/*/*_log.out")]
    said = sorted(line for text in logs for line in text.splitlines() if line.startswith("job "))
    assert said == [f"job {shipped_kind()} verl_grpo {home}/{number}" for number in range(2)]


def shipped_kind() -> str:
    return load_config(PPOConfig, "ppo_trainer").reward_manager.hypothesis_type
