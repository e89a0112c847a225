"""One run from start to finish: what it leaves, the same run killed again and again, and its model in another run."""

import json
import os
import re
import signal
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import torch
from conftest import ROOT, small_overrides
from packaging.utils import canonicalize_name
from transformers import AutoModelForCausalLM

from tests.e2e.runs import Run, records, six_steps
from verl.checkpoint.folders import checkpoints

pytestmark = pytest.mark.slow

IMPORT = re.compile(r"^ *(?:import|from) (\w+)", re.MULTILINE)
OWN = {"verl", "verl_pages", "vllm_patches"}
TRACKERS = {"mlflow", "swanlab", "tensorboard", "wandb"}
"""Imported where they are installed and asked for."""


def exported_model(run: Path) -> Path:
    return run / "global_step_6" / "actor" / "huggingface"


def test_complete_run_has_metrics_summary_and_model(trained, tiny_model):
    before, *steps = records(trained)
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5, 6]
    assert "val/pass@1" in set(before) & set(steps[-1])
    # Each number once: the names of the paper's release are off.
    assert not {"val/test_score/arithmetic", "cal/accuracy", "cal/base_v/Effective Rank"} & set(steps[-1])
    for record in steps:
        assert record["rollout/logprob_abs_diff_max"] < 1e-3
        assert record["reward_manager/shaped_token_share"] >= 0
        assert record["cal/overall/layer_1/Effective Rank/mean"] >= 1
        assert record["cal/overall/layer_2/Effective Rank diff/mean"] != 0
    gradients = [record["actor/grad_norm"] for record in steps]
    assert len(set(gradients)) == 6 and min(gradients) > 0
    assert (trained / "latest_checkpointed_iteration.txt").read_text() == "6\n"
    assert '"steps":6,' in (trained / "report.html").read_text()
    summary = json.loads((trained / "summary.json").read_text())
    assert summary["steps"] == 6 and summary["after"]["val/pass@1"] == steps[-1]["val/pass@1"]
    exported = AutoModelForCausalLM.from_pretrained(exported_model(trained)).state_dict()
    initial = AutoModelForCausalLM.from_pretrained(tiny_model).state_dict()
    assert any(not torch.equal(exported[name], initial[name]) for name in initial)


def test_step_imports_listed_packages(trained):
    imported = set(trained.with_name("imports").read_text().split())
    files = [path for folder in ("verl", "vllm_patches") for path in (ROOT / folder).rglob("*.py")]
    ours = {name for path in files for name in IMPORT.findall(path.read_text())} - OWN - TRACKERS
    of_module = packages_distributions()
    found = {canonicalize_name(of_module[name][0]) for name in imported & ours & of_module.keys()}
    listed = (ROOT / "requirements/training-step.txt").read_text().splitlines()
    assert found == {canonicalize_name(line) for line in listed if not line.startswith("#")}


@pytest.mark.nightly
def test_repeatedly_killed_run_resumes_to_the_bit(trained, tiny_model, arithmetic_prompts, tmp_path):
    folder = tmp_path / "killed"
    overrides = [*six_steps(tiny_model, arithmetic_prompts, folder), "trainer.async_save=true"]

    # 1. The driver is killed while it saves, and a damaged file in the newest checkpoint costs one step more.
    run = Run(overrides, tmp_path / "driver.log")
    run.wait_until(lambda: len(checkpoints(folder)) > 1 and bool(list(folder.glob(".global_step_*.unfinished"))))
    os.kill(run.driver, signal.SIGKILL)
    assert run.finish() == 128 + signal.SIGKILL
    _, newest = max(checkpoints(folder).items())
    shard = next((newest / "actor" / "shards").iterdir())
    shard.write_bytes(shard.read_bytes()[:-1])

    # 2. A worker is killed.
    run = Run(overrides, tmp_path / "worker.log")
    run.wait_for_line("step 4/")
    os.kill(run.workers()[0], signal.SIGKILL)
    assert run.finish() == 1
    run.assert_nothing_left(folder)
    output = run.log.read_text()
    assert f"warning: {shard} has" in output and f"resuming from {folder}/global_step_" in output
    last = max(checkpoints(folder))
    assert "died in" in output
    assert f"to resume from step {last}, run the same command with trainer.default_local_dir={folder}\n" in output

    # 3. Undisturbed to the end, where everything is as in the run that nothing interrupted.
    run = Run.complete(overrides, tmp_path / "last.log")
    run.assert_nothing_left(folder)
    assert "resuming from" in run.log.read_text()
    assert records(folder) == records(trained)
    summaries = [json.loads((path / "summary.json").read_text()) for path in (folder, trained)]
    assert summaries[0]["after"] == summaries[1]["after"] and summaries[0]["best"] == summaries[1]["best"]
    assert list(checkpoints(folder)) == list(checkpoints(trained))

    # 4. The run is complete: the command says so at once.
    (folder / "summary.json").unlink()
    run = Run.complete(overrides, tmp_path / "again.log")
    assert "the run is complete: step 6 was its last" in run.log.read_text()
    assert json.loads((folder / "summary.json").read_text())["after"] == summaries[0]["after"]


@pytest.mark.nightly
def test_policy_that_generates_itself(trained, arithmetic_prompts, tmp_path):
    folder = tmp_path / "run"
    # What a run exports is a model like any other. Both workers share the sequences that it learns from, with adapters
    # and every saving of memory.
    overrides = small_overrides(exported_model(trained), arithmetic_prompts, folder)
    overrides += ["trainer.n_gpus_per_node=2", "rollout.name=hf", "rollout.max_num_seqs=5", "actor.optim.lr=1e-3"]
    overrides += ["model.use_remove_padding=true", "model.ulysses_sequence_parallel_size=2", "model.lora.rank=4"]
    overrides += ["model.fsdp.param_offload=true", "model.fsdp.optimizer_offload=true"]
    overrides += ["actor.use_dynamic_bsz=true", "actor.ppo_max_token_len_per_gpu=64"]
    run = Run.complete([*overrides, "model.gradient_checkpointing=true", "trainer.async_save=true"], tmp_path / "log")
    run.assert_nothing_left(folder)
    before, *steps = records(folder)
    assert before["val/response_length/mean"] == records(trained)[-1]["val/response_length/mean"]
    assert len(steps) == 2 and "val/pass@1" in before
    for record in steps:
        assert record["rollout/logprob_abs_diff_max"] < 1e-3
        assert record["cal/overall/layer_2/Effective Rank diff/mean"] != 0
