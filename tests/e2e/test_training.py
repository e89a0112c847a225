"""The entry points from start to finish, and what they leave behind when they are stopped in the middle."""

import json
import os
import re
import shutil
import signal
import subprocess
from functools import cache
from pathlib import Path

import pytest
import torch
from conftest import ROOT, small_overrides
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from tests.e2e.runs import Run, records
from verl.checkpoint.folders import checkpoints

pytestmark = pytest.mark.slow

NAMESPACE = ["unshare", "--mount", "--map-root-user"]
"""Prefix of a command that may mount a file system of its own."""


@pytest.fixture(scope="module")
def two_steps(tiny_model: Path, arithmetic_prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two steps, with one engine over both workers."""
    folder = tmp_path_factory.mktemp("two_steps")
    overrides = small_overrides(tiny_model, arithmetic_prompts, folder / "run")
    # Where no answer is right, rank shaping gives the rewards: the engine is handed other weights in the second step.
    overrides += ["reward_manager.add_reward=true", "actor.optim.lr=1e-3", "trainer.report_freq=1"]
    run = Run([*overrides, "trainer.n_gpus_per_node=2", "rollout.tensor_parallel_size=2"], folder / "log")
    assert run.finish() == 0, run.log.read_text()
    run.assert_nothing_left(folder / "run")
    assert not list(Path("/dev/shm").glob("verl-*"))
    return folder / "run"


def test_what_a_run_leaves(two_steps, tiny_model):
    found = records(two_steps)
    assert [record["step"] for record in found] == [0, 1, 2]
    assert "val/pass@1" in set(found[0]) & set(found[2])
    # Each number once: the names of the paper's release are off.
    assert not {"val/test_score/arithmetic", "cal/accuracy", "cal/base_v/Effective Rank"} & set(found[2])
    for record in found[1:]:
        assert record["rollout/logprob_abs_diff_max"] < 1e-3
        assert record["reward_manager/shaped_token_share"] >= 0
        assert record["cal/overall/layer_1/Effective Rank/mean"] >= 1
        assert record["cal/overall/layer_2/Effective Rank diff/mean"] != 0
    assert (two_steps / "latest_checkpointed_iteration.txt").read_text() == "2\n"
    assert '"steps":2,' in (two_steps / "report.html").read_text()
    summary = json.loads((two_steps / "summary.json").read_text())
    assert summary["steps"] == 2 and summary["after"]["val/pass@1"] == found[2]["val/pass@1"]
    exported = AutoModelForCausalLM.from_pretrained(exported_model(two_steps)).state_dict()
    initial = AutoModelForCausalLM.from_pretrained(tiny_model).state_dict()
    assert any(not torch.equal(exported[name], initial[name]) for name in initial)


@cache
def documented_names() -> re.Pattern[str]:
    """What the tables of docs/metrics.md have in their first column."""
    rows = [line.split(" | ")[0] for line in (ROOT / "docs" / "metrics.md").read_text().splitlines()]
    names = [name for row in rows if row.startswith("| `") for name in re.findall(r"`([^`]+)`", row)]
    names += [f"val/<source>/{name}" for name in names] + [f"val/{name}" for name in names]
    alternatives = str.maketrans({"{": "(", ",": "|", "}": ")"})
    return re.compile("|".join(re.sub("<[a-z]+>", "[^/]+", name.translate(alternatives)) for name in names))


def exported_model(run: Path) -> Path:
    return run / "global_step_2" / "actor" / "huggingface"


def test_a_policy_that_generates_itself(two_steps, arithmetic_prompts, tmp_path):
    folder = tmp_path / "run"
    # What a run exports is a model like any other. Both workers share the sequences that it learns from, with adapters
    # and every saving of memory.
    overrides = small_overrides(exported_model(two_steps), arithmetic_prompts, folder)
    overrides += ["trainer.n_gpus_per_node=2", "rollout.name=hf", "rollout.max_num_seqs=5", "actor.optim.lr=1e-3"]
    overrides += ["model.use_remove_padding=true", "model.ulysses_sequence_parallel_size=2", "model.lora.rank=4"]
    overrides += ["model.fsdp.param_offload=true", "model.fsdp.optimizer_offload=true"]
    overrides += ["actor.use_dynamic_bsz=true", "actor.ppo_max_token_len_per_gpu=64"]
    run = Run([*overrides, "model.gradient_checkpointing=true", "trainer.async_save=true"], tmp_path / "log")
    assert run.finish() == 0, run.log.read_text()
    run.assert_nothing_left(folder)
    before, *steps = records(folder)
    assert before["val/response_length/mean"] == records(two_steps)[2]["val/response_length/mean"]
    assert len(steps) == 2 and "val/pass@1" in before
    for record in steps:
        assert record["rollout/logprob_abs_diff_max"] < 1e-3
        assert record["cal/overall/layer_2/Effective Rank diff/mean"] != 0


TOKEN_METRICS = ("avg_log_probs", "avg_response_entropy", "avg_logits_entropy")

EXPERIMENTS = {
    # The critic of two workers, of another model than the policy, learns alone at first; every response that is cut
    # off is left out of the losses. Rows are packed, and the policy measures the hidden states and the tokens, of which
    # one metric is the guide and another an indicator.
    "verl_ppo": [
        *("trainer.n_gpus_per_node=2", "trainer.critic_warmup=1", "trainer.remove_clip=true"),
        # Nothing that two workers could share evenly: mini-batches of 6 and 3 responses, and one validation prompt.
        *("data.train_batch_size=3", "rollout.n=3", "data.val_sample_size=1"),
        # A third of the responses end before they are cut.
        f"rollout.stop_token_ids={[*range(30, 40)]}".replace(" ", ""),
        *("reward_model.enable=true", "model.use_remove_padding=true", "calculator.source=actor"),
        *("actor.use_dynamic_bsz=true", "calculator.prefix_rule=at_stride_and_whole"),
        "calculator.metric_indices_add=[avg_log_probs,avg_response_entropy,avg_logits_entropy]",
        "reward_manager.indicator_names=[avg_log_probs]",
        *("reward_manager.w_explore=[1]", "reward_manager.w_exploit=[-1]"),
        "reward_manager.guidance_metric=avg_logits_entropy",
    ],
    "dapo": [
        *("rollout.name=hf", "algorithm.filter_groups.max_num_gen_batches=2"),
        *("reward_score.overlong_buffer.len=4", "calculator.compute_diff=false"),
    ],
    "released_code": ["algorithm=remax", "reward_model.enable=true", "trainer.except_save=[1]", "rollout.n=1"],
}
"""Name -> what is tried with it, beyond the small run."""


@pytest.fixture(scope="module")
def reward_model(tiny_model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("judge")
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "experiment", ["verl_ppo", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("dapo", "released_code"))]
)
def test_experiments(experiment, two_steps, tiny_model, arithmetic_prompts, reward_model, tmp_path):
    folder = tmp_path / "run"
    # vLLM too loads what a run exports.
    model = exported_model(two_steps) if experiment == "released_code" else tiny_model
    overrides = [*small_overrides(model, arithmetic_prompts, folder), f"experiment={experiment}"]
    other_model = [f"reward_model.model.path={reward_model}", f"critic.model.path={reward_model}"]
    other_model.append("reward_model.max_length=512")
    run = Run([*overrides, *other_model, *EXPERIMENTS[experiment]], tmp_path / "log")
    assert run.finish() == 0, run.log.read_text()
    run.assert_nothing_left(folder)
    before, first, second = records(folder)
    for record in (first, second):
        assert record["rollout/logprob_abs_diff_max"] < 1e-3
        assert [name for name in record if name != "step" and not documented_names().fullmatch(name)] == []
        assert record["critic/score_0/mean"] == record["score/mean"]
        assert "cal/overall/layer_1/Effective Rank/mean" in record
        assert ("critic/advantages_0/mean" in record) == (experiment != "dapo")
    checkpoint = folder / "global_step_2"
    if experiment == "verl_ppo":
        # It comes with a head, so has an opinion at once; the second step trains the policy too.
        assert "actor/lr" not in first and first["critic/values/max"] != 0
        assert "actor/lr" in second and first["critic/lr"] == second["critic/lr"] > 0
        assert second["filtered_response_length/max"] < 12 == second["response_length/max"]
        assert 0 < second["response_length/clip_ratio"] < 1
        for record, prefix in ((before, "val/"), (first, ""), (second, "")):
            tokens = {name: record[f"{prefix}cal/overall/layer_2/{name}/mean"] for name in TOKEN_METRICS}
            assert tokens["avg_log_probs"] < 0 < tokens["avg_logits_entropy"] and tokens["avg_response_entropy"] > 0
        # Two layers see the same tokens; the second step is measured against the means of the first.
        for name in ("avg_log_probs", "avg_logits_entropy"):
            mean = first[f"cal/overall/layer_1/{name}/mean"]
            assert mean == first[f"cal/overall/layer_2/{name}/mean"]
            assert second[f"reward_manager/layer_1/{name}/mu"] == pytest.approx(mean, rel=1e-6)
        assert second["reward_manager/phi_std"] > 0
        critic = AutoModelForTokenClassification.from_pretrained(checkpoint / "critic" / "huggingface")
        assert critic.score.weight.shape[0] == 1 and critic.score.weight.any()
    elif experiment == "dapo":
        # An untrained model is always wrong: no group differs, nothing is learned from, and the log says so.
        assert second["train/num_gen_batches"] == 2 and second["train/filler_groups"] == 4
        assert second.get("verifier/different", 0) + second.get("verifier/missing", 0) == 2 * 16
        assert second["critic/score/mean"] < second["critic/score_0/mean"] == 0
        assert "actor/lr" not in second
        assert not [name for name in second if name.startswith("reward_manager/")]
        # Only the matrix of mean states still has a velocity: it has a switch of its own.
        assert not [name for name in second if " diff" in name and "/cumulative/" not in name]
    else:
        assert before["val/response_length/mean"] == records(two_steps)[2]["val/response_length/mean"]
        assert {"train/greedy_score/mean", "actor/kl_loss"} <= set(second)
        # The reward model's opinion counts, and rank shaping does not.
        assert second["critic/score/mean"] != second["critic/score_0/mean"]
        assert second["critic/advantages/mean"] == second["critic/advantages_0/mean"] != 0
        assert second["reward_manager/shaped_token_share"] == 0 == second["reward_manager/phi_max"]
        assert (folder / "global_step_1" / "actor").is_dir() and checkpoint.is_dir()


STOPS = {
    "sigint to the driver": (1, lambda run: run.process.send_signal(signal.SIGINT), 130, "interrupted"),
    "preemption": (
        1,
        lambda run: run.process.send_signal(signal.SIGTERM),
        75,
        "is saved; exit code 75: start it again",
    ),
    "killed worker": (2, lambda run: os.kill(run.workers()[0], signal.SIGKILL), 1, "died in"),
}
"""Name -> number of workers, what stops the run, its exit code, a word of its message. Ctrl-C: test_long_run.py."""


@pytest.mark.parametrize(
    "name", ["killed worker", "preemption", pytest.param("sigint to the driver", marks=pytest.mark.nightly)]
)
def test_a_stopped_run_leaves_nothing(name, tiny_model, arithmetic_prompts, tmp_path):
    workers, stop, code, message = STOPS[name]
    folder = tmp_path / "run"
    overrides = [*small_overrides(tiny_model, arithmetic_prompts, folder), f"trainer.n_gpus_per_node={workers}"]
    overrides += [
        "trainer.total_training_steps=1000",
        "trainer.total_epochs=1000",
        "trainer.save_freq=2",
        "trainer.max_restarts=0",
    ]
    run = Run([*overrides, "rollout.name=hf"], tmp_path / "log")
    run.wait_for_line("step 3/")
    assert len(run.processes()) > 3 and len(run.workers()) == workers, run.processes()
    stop(run)
    assert run.finish() == code, run.log.read_text()
    run.assert_nothing_left(folder)
    assert message in run.log.read_text()
    if name == "preemption":
        # Steps 2, 4 and so on are saved anyway.
        assert records(folder)[-1]["step"] == max(checkpoints(folder)) >= 3


@pytest.mark.nightly
def test_a_full_disk_while_saving_ends_the_run(tiny_model, arithmetic_prompts, tmp_path):
    if not shutil.which("unshare") or subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode:
        pytest.skip("a file system of its own size needs unshare with user namespaces")
    disk, kept = tmp_path / "disk", tmp_path / "kept"
    disk.mkdir(), kept.mkdir()
    # The model takes 3.4 MB, and the disk 2: what is left on it is copied out before the namespace ends.
    script = f'mount -t tmpfs -o size=2m tmpfs {disk}; "$@"; code=$?; cp -a {disk}/. {kept}; exit $code'
    overrides = small_overrides(tiny_model, arithmetic_prompts, disk / "run")
    run = Run([*overrides, "rollout.name=hf"], tmp_path / "log", prefix=(*NAMESPACE, "sh", "-c", script, "sh"))
    assert run.finish() == 1, run.log.read_text()
    assert "No space left on device" in run.log.read_text()
    run.assert_nothing_left(kept / "run")
    assert not list((kept / "run").glob("global_step_*"))
    assert not (kept / "run" / "latest_checkpointed_iteration.txt").exists()
    assert len(records(kept / "run")) >= 2
