"""What chooses prompts, edits them and makes batches, in one training through the entry point, and resumed."""

import json
from pathlib import Path

import pytest
from conftest import ROOT, small_overrides

from tests.e2e.runs import Run, records
from tests.extending.examples import example
from verl.checkpoint.folders import read_state

pytestmark = pytest.mark.slow


def test_a_resumed_run_chooses_and_replays_as_one_that_was_not_interrupted(arithmetic_prompts, tmp_path):
    files = {name: example(tmp_path, f"{name}.py") for name in ("selector", "hints", "replay")}
    # The embedded model, which is right now and then.
    overrides = small_overrides(ROOT / "data/tiny_model", arithmetic_prompts, tmp_path / "whole")
    overrides += [
        "data.val_files=[]",
        "data.max_response_length=64",
        "data.train_batch_size=4",
        f"data.selector={files['selector']}:NearHalf",
        "data.selector_candidates=2",
        "+data.selector_kwargs.memory=0.25",
        f"rollout.regenerate={files['hints']}:Hints",
        "rollout.regenerate_rounds=2",
        "data.max_prompt_length=96",
        f"algorithm.recompose={files['replay']}:ReplayInformative",
        "algorithm.recompose_buffer=12",
        "trainer.total_training_steps=4",
        "trainer.total_epochs=2",
        "trainer.save_freq=2",
        "actor.optim.lr=1e-3",
    ]
    run = Run(overrides, tmp_path / "log")
    assert run.finish() == 0, run.log.read_text()
    whole = records(tmp_path / "whole")
    state = read_state(tmp_path / "whole/global_step_2")["hooks"]
    assert len(state["selector"]["accuracy"]) == 8 and len(state["buffer"]["texts"]) > 0
    resumed = [
        f"trainer.default_local_dir={tmp_path}/resumed",
        "trainer.resume_mode=path",
        f"trainer.resume_from_path={tmp_path}/whole/global_step_2",
    ]
    run = Run([*overrides, *resumed], tmp_path / "log_resumed")
    assert run.finish() == 0, run.log.read_text()
    assert records(tmp_path / "resumed") == whole[2:]
    assert sum(record["regenerate/groups"] for record in whole[2:]) > 0
    assert sum(record["recompose/replayed"] for record in whole[2:]) > 0
    assert _hooks(tmp_path / "resumed") == _hooks(tmp_path / "whole")


def _hooks(folder: Path) -> str:
    return json.dumps(read_state(folder / "global_step_4")["hooks"])
