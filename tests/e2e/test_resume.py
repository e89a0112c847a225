"""Runs that are stopped in the middle: what they leave, and that they resume as if nothing had happened."""

import os
import re
import shutil
import signal
import subprocess

import pytest
from conftest import small_overrides

from tests.e2e.runs import Run, assert_resumes, records, six_steps
from verl.checkpoint.folders import checkpoints
from verl.data.files import read_rows
from verl.data.records import RL_SCHEMA, write_parquet

pytestmark = pytest.mark.slow

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


@pytest.mark.nightly
def test_dynamic_sampling_resumes_to_the_bit(tiny_model, arithmetic_prompts, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    (tmp_path / "chance.py").write_text(CHANCE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    rows = read_rows(str(arithmetic_prompts))
    rows = [row | {"data_source": f"set {number % 2}"} for number, row in enumerate(rows)]
    write_parquet(tmp_path / "two_sets.parquet", rows, RL_SCHEMA)
    overrides = [*small_overrides(tiny_model, arithmetic_prompts, folder), *DYNAMIC]
    overrides.append(f"data.train_files=[{tmp_path}/two_sets.parquet]")
    Run.complete(overrides, tmp_path / "whole.log")
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

    assert_resumes(overrides, folder, 4, 2, tmp_path / "resumed.log")


@pytest.mark.nightly
def test_stale_driver_cannot_write(tiny_model, arithmetic_prompts, tmp_path):
    folder = tmp_path / "run"
    overrides = [
        *six_steps(tiny_model, arithmetic_prompts, folder),
        "rollout.name=hf",
        "trainer.val_before_train=false",
    ]
    overrides += ["trainer.async_save=true", "trainer.max_restarts=3", "trainer.detection_s=5"]
    paused = Run(overrides, tmp_path / "paused.log")
    paused.wait_until(lambda: bool(list(folder.glob(".global_step_*.unfinished"))))
    os.kill(paused.driver, signal.SIGSTOP)
    # As over NFS, where the lock of a machine that is not heard of is given away.
    (folder / ".lock").unlink()
    Run.complete(overrides, tmp_path / "log")
    before, found = records(folder), list(checkpoints(folder))
    assert paused.workers() == []  # they lost their driver
    os.kill(paused.driver, signal.SIGCONT)
    assert paused.finish() == 1
    assert "since attempt 2 has taken over" in paused.log.read_text()
    assert records(folder) == before and list(checkpoints(folder)) == found and len(before) == 6
    paused.assert_nothing_left(folder)
    assert (folder / ".attempt").read_text() == "2\n" and (folder / "summary.json").exists()


@pytest.mark.nightly
def test_preempted_run_saves_its_step(tiny_model, arithmetic_prompts, tmp_path):
    folder = tmp_path / "run"
    overrides = [*small_overrides(tiny_model, arithmetic_prompts, folder), "rollout.name=hf", "trainer.max_restarts=0"]
    overrides += ["trainer.total_training_steps=1000", "trainer.total_epochs=1000", "trainer.save_freq=2"]
    run = Run(overrides, tmp_path / "log")
    run.wait_for_line("step 3/")
    run.process.send_signal(signal.SIGTERM)
    assert run.finish() == 75, run.log.read_text()
    run.assert_nothing_left(folder)
    assert "is saved; exit code 75: start it again" in run.log.read_text()
    # Steps 2, 4 and so on are saved anyway.
    assert records(folder)[-1]["step"] == max(checkpoints(folder)) >= 3


NAMESPACE = ["unshare", "--mount", "--map-root-user"]
"""Prefix of a command that may mount a file system of its own."""


@pytest.mark.nightly
def test_full_disk_while_saving_ends_the_run(tiny_model, arithmetic_prompts, tmp_path):
    if not shutil.which("unshare") or subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode:
        pytest.skip("a file system of its own size needs unshare with user namespaces")
    disk, kept = tmp_path / "disk", tmp_path / "kept"
    disk.mkdir(), kept.mkdir()
    # The model takes 3.4 MB, and the disk 2: what is left on it is copied out before the namespace ends.
    script = f'mount -t tmpfs -o size=2m tmpfs {disk}; "$@"; code=$?; cp -a {disk}/. {kept}; exit $code'
    overrides = small_overrides(tiny_model, arithmetic_prompts, disk / "run")
    run = Run([*overrides, "rollout.name=hf"], tmp_path / "log", prefix=(*NAMESPACE, "sh", "-c", script, "sh"))
    assert run.finish() == 1, run.log.read_text()
    (line,) = [line for line in run.log.read_text().splitlines() if "No space left on device" in line]
    needed = r"No space left on device, [\d.]+ MB needed, [01]\.\d MB free"
    assert re.fullmatch(rf"error: {disk}/run\S*: cannot be written \({needed}\); make room, and start it again", line)
    assert "Traceback" not in run.log.read_text()
    run.assert_nothing_left(kept / "run")
    assert not list((kept / "run").glob("global_step_*"))
    assert not (kept / "run" / "latest_checkpointed_iteration.txt").exists()
    assert len(records(kept / "run")) >= 2
