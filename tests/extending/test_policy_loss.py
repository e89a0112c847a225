"""The example of a policy loss, run as a user would run it."""

import math
from pathlib import Path

import pytest
from conftest import small_overrides

from tests.e2e.runs import Run, records
from tests.extending.examples import example


@pytest.mark.slow
@pytest.mark.nightly
def test_the_policy_loss(tiny_model, arithmetic_prompts, tmp_path: Path):
    file, folder = example(tmp_path, "listwise.py"), tmp_path / "run"
    overrides = [
        *small_overrides(tiny_model, arithmetic_prompts, folder),
        f"actor.policy_loss={file}:listwise",
        "+actor.policy_loss_kwargs.bonus=0.01",
        *("data.val_files=[]", "rollout.name=hf"),
    ]
    refused = Run(overrides, tmp_path / "refused")
    assert refused.finish() == 1
    assert "actor.micro_batch_size_per_gpu=3: " in refused.log.read_text() and not folder.exists()
    # One group of two goes to each worker in an update of two prompts.
    run = Run([*overrides, "actor.micro_batch_size_per_gpu=4", "trainer.n_gpus_per_node=2"], tmp_path / "log")
    assert run.finish() == 0, run.log.read_text()
    for record in records(folder):
        assert record["actor/listwise_gap"] >= 0 and math.isfinite(record["actor/pg_loss"])
        assert record["actor/grad_norm"] > 0
