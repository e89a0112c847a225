"""Engines on another machine than the trainer give the numbers of one machine that holds both."""

import re
import shutil
from pathlib import Path

import pytest
from conftest import small_overrides

from tests.cluster.machines import cluster
from tests.cluster.training import ray_head, ray_join
from tests.e2e.runs import records

pytestmark = pytest.mark.nightly

OPTIONS = [
    *("trainer.n_gpus_per_node=1", "rollout.nnodes=1", "rollout.n_gpus_per_node=1", "async_training.max_staleness=1"),
    *("algorithm.rollout_correction.rollout_is=token", "actor.optim.lr=1e-3"),
    *("reward_manager.add_reward=true", "trainer.test_freq=2"),
    *("trainer.total_training_steps=3", "trainer.save_freq=1", "trainer.save_hf_model=false"),
]


def test_engines_on_another_machine(tmp_path, tiny_model, arithmetic_prompts):
    shared = tmp_path / "shared"
    shutil.copytree(tiny_model, shared / "model")
    shutil.copy(arithmetic_prompts, shared / "prompts.parquet")

    def command(folder: Path) -> list[str]:
        overrides = small_overrides(shared / "model", shared / "prompts.parquet", folder)
        return ["python", "-m", "verl.trainer.main_ppo", *overrides, *OPTIONS]

    with cluster(2, tmp_path / "machines", shared=[shared]) as (one, two):
        code, text = one.run(command(shared / "alone"))
        assert code == 0, text
        ray_head(one)
        ray_join(two, one)
        code, text = one.run(command(shared / "apart"), RAY_ADDRESS=f"{one.address}:6379")
        assert code == 0, text
    logs = shared / "apart/logs/attempt_1"
    hosts = [re.match(r"worker 0 on (\w+)", (logs / name).read_text()) for name in ("rank_0.log", "engines/rank_0.log")]
    # Each has room for one worker.
    assert sorted(host[1] for host in hosts if host) == ["machine1", "machine2"]
    assert len(records(shared / "apart")) == 4 and records(shared / "apart") == records(shared / "alone")
