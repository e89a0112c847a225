"""Runs that are killed and resume as if nothing had happened."""

import json
import os
import shutil
import signal

import pytest
from conftest import small_overrides

from tests.e2e.runs import Run, records
from verl.checkpoint.folders import checkpoints
from verl.data.files import read_rows
from verl.data.records import RL_SCHEMA, write_parquet

pytestmark = pytest.mark.slow

OPTIONS = [
    # Every step changes the weights: where no answer is right, rank shaping gives the rewards. Four steps an epoch.
    *("reward_manager.add_reward=true", "actor.optim.lr=1e-3", "trainer.total_training_steps=6", "trainer.save_freq=1"),
    *("trainer.async_save=true", "trainer.save_hf_model=false", "trainer.max_ckpt_to_keep=2", "trainer.test_freq=4"),
    "trainer.val_before_train=false",
    # What a restart would do by itself is tried in tests/cluster/test_recovery.py.
    "trainer.max_restarts=0",
]


def test_killed_runs_resume_to_the_bit(tiny_model, arithmetic_prompts, tmp_path):
    folder, alone = tmp_path / "killed", tmp_path / "alone"
    overrides = [*small_overrides(tiny_model, arithmetic_prompts, folder), *OPTIONS]

    run = Run(overrides, tmp_path / "driver.log")
    run.wait_until(lambda: len(checkpoints(folder)) > 1)
    os.kill(run.process.pid, signal.SIGKILL)
    assert run.finish() == -signal.SIGKILL
    # A damaged file in the newest checkpoint costs one step.
    _, newest = max(checkpoints(folder).items())
    shard = next((newest / "actor" / "shards").iterdir())
    shard.write_bytes(shard.read_bytes()[:-1])

    run = Run(overrides, tmp_path / "worker.log")
    run.wait_for_line("step 4/")
    os.kill(run.workers()[0], signal.SIGKILL)
    assert run.finish() == 1
    output = run.log.read_text()
    assert f"warning: {shard} has" in output and f"resuming from {folder}/global_step_" in output
    last = max(checkpoints(folder))
    assert f"to resume from step {last}, run the same command with trainer.default_local_dir={folder}\n" in output

    run = Run(overrides, tmp_path / "saving.log")
    run.wait_until(lambda: bool(list(folder.glob(".global_step_*.unfinished"))))
    os.kill(run.process.pid, signal.SIGKILL)
    assert run.finish() == -signal.SIGKILL

    run = Run(overrides, tmp_path / "last.log")
    assert run.finish() == 0, run.log.read_text()
    run.assert_nothing_left(folder)
    assert "resuming from" in run.log.read_text()
    uninterrupted = Run(
        [*overrides, f"trainer.default_local_dir={alone}", "trainer.async_save=false"], tmp_path / "log"
    )
    assert uninterrupted.finish() == 0, uninterrupted.log.read_text()
    assert [record["step"] for record in records(alone)] == list(range(1, 7))
    assert records(folder) == records(alone)
    gradients = [record["actor/grad_norm"] for record in records(alone)]
    assert len(set(gradients)) == 6 and min(gradients) > 0
    summaries = [json.loads((path / "summary.json").read_text()) for path in (folder, alone)]
    assert summaries[0]["after"] == summaries[1]["after"] and summaries[0]["best"] == summaries[1]["best"]
    assert list(checkpoints(folder)) == list(checkpoints(alone))

    # The run is complete: the command says so at once.
    (folder / "summary.json").unlink()
    run = Run(overrides, tmp_path / "again.log")
    assert run.finish() == 0
    assert "the run is complete: step 6 was its last" in run.log.read_text()
    assert json.loads((folder / "summary.json").read_text())["after"] == summaries[0]["after"]


DYNAMIC = [
    # A right answer is a matter of chance, so that some groups have one and others have not.
    *("reward_score.custom_functions=['*=chance:score']", "algorithm.filter_groups.enable=true"),
    *("algorithm.filter_groups.max_num_gen_batches=2", "actor.optim.lr=1e-3", "trainer.total_training_steps=4"),
    *("trainer.except_save=[2]", "trainer.save_hf_model=false", "data.val_files=[]", "rollout.name=hf"),
]
CHANCE = """
import zlib

def score(data_source, solution_str, ground_truth, extra_info=None):
    right = zlib.crc32(solution_str.encode()) % 9 == 0
    return {"score": float(right), "chars": len(solution_str), "text": solution_str}
"""


def test_dynamic_sampling_resumes_to_the_bit(tiny_model, arithmetic_prompts, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    (tmp_path / "chance.py").write_text(CHANCE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    rows = read_rows(str(arithmetic_prompts))
    rows = [row | {"data_source": f"set {number % 2}"} for number, row in enumerate(rows)]
    write_parquet(tmp_path / "two_sets.parquet", rows, RL_SCHEMA)
    overrides = [*small_overrides(tiny_model, arithmetic_prompts, folder), *DYNAMIC]
    overrides.append(f"data.train_files=[{tmp_path}/two_sets.parquet]")
    run = Run(overrides, tmp_path / "whole.log")
    assert run.finish() == 0, run.log.read_text()
    whole = records(folder)
    assert [record["step"] for record in whole] == [1, 2, 3, 4]
    # Up to the checkpoint more batches were drawn than there were steps, and not all groups could be learned from.
    assert sum(record["train/num_gen_batches"] for record in whole[:2]) > 2
    assert any(record["train/filler_groups"] for record in whole)
    assert len({record["actor/grad_norm"] for record in whole}) == 4
    # Figures of each data source, and what the function returned besides the score.
    assert all(record["train/reward_extra/chars/mean"] > 0 for record in whole)
    of_first = {name.removeprefix("train/set 0/") for record in whole for name in record if "train/set 0/" in name}
    assert of_first >= {"pass@1", "score/mean", "rewards/mean", "response_length/mean", "response_length/clip_ratio"}
    assert of_first >= {"reward_extra/chars/mean", "reward_extra/chars/count"}
    assert any("train/set 1/pass@1" in record for record in whole)

    shutil.rmtree(folder / "global_step_4")
    (folder / "summary.json").unlink()
    run = Run(overrides, tmp_path / "resumed.log")
    assert run.finish() == 0, run.log.read_text()
    assert f"resuming from {folder}/global_step_2" in run.log.read_text()
    assert records(folder) == whole


@pytest.mark.nightly
def test_a_paused_driver_that_goes_on_after_another_took_over_writes_nothing(tiny_model, arithmetic_prompts, tmp_path):
    folder = tmp_path / "run"
    overrides = [*small_overrides(tiny_model, arithmetic_prompts, folder), *OPTIONS, "rollout.name=hf"]
    overrides += ["trainer.max_restarts=3", "trainer.detection_s=5"]
    paused = Run(overrides, tmp_path / "paused.log")
    paused.wait_until(lambda: bool(list(folder.glob(".global_step_*.unfinished"))))
    os.kill(paused.process.pid, signal.SIGSTOP)
    # As over NFS, where the lock of a machine that is not heard of is given away.
    (folder / ".lock").unlink()
    run = Run(overrides, tmp_path / "log")
    assert run.finish() == 0, run.log.read_text()
    before, found = records(folder), list(checkpoints(folder))
    assert paused.workers() == []  # they lost their driver
    os.kill(paused.process.pid, signal.SIGCONT)
    assert paused.finish() == 1
    assert "since attempt 2 has taken over" in paused.log.read_text()
    assert records(folder) == before and list(checkpoints(folder)) == found and len(before) == 6
    paused.assert_nothing_left(folder)
    assert (folder / ".attempt").read_text() == "2\n" and (folder / "summary.json").exists()
