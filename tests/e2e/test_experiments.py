"""Experiments that are shipped, with what a small run of them can show."""

import os
import re
import signal
from functools import cache

import pytest
from conftest import ROOT, small_overrides
from transformers import AutoModelForTokenClassification

from tests.e2e.runs import Run, records

pytestmark = pytest.mark.slow


@cache
def documented_names() -> re.Pattern[str]:
    """What the tables of docs/metrics.md have in their first column."""
    rows = [line.split(" | ")[0] for line in (ROOT / "docs" / "metrics.md").read_text().splitlines()]
    names = [name for row in rows if row.startswith("| `") for name in re.findall(r"`([^`]+)`", row)]
    names += [f"val/<source>/{name}" for name in names] + [f"val/{name}" for name in names]
    alternatives = str.maketrans({"{": "(", ",": "|", "}": ")"})
    return re.compile("|".join(re.sub("<[a-z]+>", "[^/]+", name.translate(alternatives)) for name in names))


TOKEN_METRICS = ("avg_log_probs", "avg_response_entropy", "avg_logits_entropy")

EXPERIMENTS = {
    # The critic of two workers, of another model than the policy, learns alone at first; one engine is spread over both
    # workers; every response that is cut off is left out of the losses. Rows are packed, and the policy measures the
    # hidden states and the tokens, of which one metric is the guide and another an indicator.
    "verl_ppo": [
        *("trainer.n_gpus_per_node=2", "trainer.critic_warmup=1", "trainer.remove_clip=true"),
        "rollout.tensor_parallel_size=2",
        # Nothing that two workers could share evenly: mini-batches of 6 and 3 responses, and one validation prompt.
        *("data.train_batch_size=3", "rollout.n=3", "data.val_sample_size=1"),
        # A third of the responses end before they are cut.
        f"rollout.stop_token_ids={[*range(30, 40)]}".replace(" ", ""),
        *("reward_model.enable=true", "model.use_remove_padding=true", "calculator.source=actor"),
        *("actor.use_dynamic_bsz=true", "calculator.prefix_rule=at_stride_and_whole"),
        "calculator.metric_indices_add=[avg_log_probs,avg_response_entropy,avg_logits_entropy]",
        "reward_manager.indicator_names=[avg_log_probs]",
        *("reward_manager.w_explore=[1]", "reward_manager.w_exploit=[-1]"),
        # A teacher that is the policy's first model, and of which the policy learns exactly.
        *("teacher.loss=jsd", "teacher.rank_metrics=true"),
        "reward_manager.guidance_metric=avg_logits_entropy",
        # It is interrupted in its third step.
        *("trainer.total_training_steps=1000", "trainer.total_epochs=1000", "trainer.save_freq=2"),
    ],
    "dapo": [
        *("rollout.name=hf", "algorithm.filter_groups.max_num_gen_batches=2"),
        *("reward_score.overlong_buffer.len=4", "calculator.compute_diff=false"),
    ],
    "released_code": ["algorithm=remax", "reward_model.enable=true", "trainer.except_save=[1]", "rollout.n=1"],
}
"""Name -> what is tried with it, beyond the small run."""


@pytest.mark.parametrize(
    "experiment", ["verl_ppo", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("dapo", "released_code"))]
)
def test_experiments(experiment, tiny_model, arithmetic_prompts, reward_model, tmp_path, request):
    folder, model = tmp_path / "run", tiny_model
    if experiment == "released_code":
        # vLLM too loads what a run exports.
        trained = request.getfixturevalue("trained")
        model = trained / "global_step_6" / "actor" / "huggingface"
    overrides = [*small_overrides(model, arithmetic_prompts, folder), f"experiment={experiment}"]
    other_model = [f"reward_model.model.path={reward_model}", f"critic.model.path={reward_model}"]
    other_model += ["reward_model.max_length=512", *([f"teacher.model.path={model}"] * (experiment == "verl_ppo"))]
    run = Run([*overrides, *other_model, *EXPERIMENTS[experiment]], tmp_path / "log")
    if experiment == "verl_ppo":
        run.wait_for_line("step 3/")
        assert len(run.processes()) > 3 and len(run.workers()) == 2, run.processes()
        # Ctrl-C: to every process of the group, vLLM's included, which brings signal handlers of its own.
        os.killpg(run.driver, signal.SIGINT)
    assert run.finish() == (130 if experiment == "verl_ppo" else 0), run.log.read_text()
    run.assert_nothing_left(folder)
    before, first, second = records(folder)[:3]
    for record in (first, second):
        assert record["rollout/logprob_abs_diff_max"] < 1e-3
        assert [name for name in record if name != "step" and not documented_names().fullmatch(name)] == []
        assert record["critic/score_0/mean"] == record["score/mean"]
        assert "cal/overall/layer_1/Effective Rank/mean" in record
        assert ("critic/advantages_0/mean" in record) == (experiment != "dapo")
    checkpoint = folder / "global_step_2"
    if experiment == "verl_ppo":
        assert "interrupted" in run.log.read_text()
        run.assert_no_shared_memory()
        # It comes with a head, so has an opinion at once; the second step trains the policy too.
        assert "actor/lr" not in first and first["critic/values/max"] != 0
        # The policy is its teacher, to the bit, until it has learned from rewards.
        assert first["teacher/reverse_kl"] == second["teacher/reverse_kl"] == 0 < second["actor/teacher_loss"] < 0.01
        name = "layer_2/Effective Rank/mean"
        assert second[f"teacher/{name}"] == pytest.approx(second[f"cal/overall/{name}"], rel=1e-6)
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
        assert before["val/response_length/mean"] == records(trained)[-1]["val/response_length/mean"]
        assert {"train/greedy_score/mean", "actor/kl_loss"} <= set(second)
        # The reward model's opinion counts, and rank shaping does not.
        assert second["critic/score/mean"] != second["critic/score_0/mean"]
        assert second["critic/advantages/mean"] == second["critic/advantages_0/mean"] != 0
        assert second["reward_manager/shaped_token_share"] == 0 == second["reward_manager/phi_max"]
        assert (folder / "global_step_1" / "actor").is_dir() and checkpoint.is_dir()
