"""A pretrained model on two machines."""

from pathlib import Path

import pytest

from tests.cluster.machines import cluster
from tests.cluster.training import Training, ray_head, ray_join
from tests.e2e.runs import Run, records

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(1500)]


def test_two_machines_have_the_numbers_of_two_workers_on_one(smollm2: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as machines have it
    options = ["preset=small", "data=word_problems", f"model.path={smollm2}", "device=cpu", "rollout.n=4"]
    options += ["data.train_batch_size=4", "actor.ppo_mini_batch_size=2", "trainer.total_training_steps=2"]
    options += ["trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.save_freq=0"]
    alone = tmp_path / "alone"
    run = Run([*options, "trainer.n_gpus_per_node=2", f"trainer.default_local_dir={alone}"], tmp_path / "log")
    assert run.finish(600) == 0, run.log.read_text()
    shared = tmp_path / "shared"
    shared.mkdir()
    training = Training(shared / "run", smollm2, Path("data/word_problems/train.parquet"))
    training.overrides = [*options, "trainer.nnodes=2", "trainer.n_gpus_per_node=1"]
    training.overrides.append(f"trainer.default_local_dir={training.folder}")
    with cluster(2, tmp_path / "machines", shared=[shared, smollm2]) as (one, two):
        ray_head(one)
        ray_join(two, one)
        process = training.start(one, one)
        assert process.wait(600) == 0, process.text
    found = training.records()
    assert [record["step"] for record in found] == [1, 2] and found[1]["actor/grad_norm"] > 0
    assert found == records(alone)
