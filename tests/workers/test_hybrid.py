"""The hybrid worker with its real engines: Ray, FSDP2 over gloo, vLLM."""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import changed
from tiny_tokenizer import make_tiny_tokenizer
from transformers import AutoModelForCausalLM

from tests.workers.groups import all_prompts, policy_batch, relative_difference, sample, scored, start_group
from verl.config import PPOConfig
from verl.data.prompt_rows import PromptRecord
from verl.rank.calculator import RepresentationMetricsCalculator
from verl.rollout import end_tokens
from verl.rollout.queue import EngineRoom
from verl.single_controller.roles import RoleWorkers
from verl.single_controller.worker_group import WorkerGroup
from verl.workers.hybrid import HybridWorker

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def one(small_config: PPOConfig, ray_session: None) -> Iterator[WorkerGroup]:
    """One worker, whose weights no test changes."""
    group = start_group(small_config, 1)
    yield group
    group.close()


@pytest.fixture(scope="module")
def two(small_config: PPOConfig, ray_session: None) -> Iterator[WorkerGroup]:
    """Two workers, whose weights no test changes."""
    group = start_group(small_config, 2)
    yield group
    group.close()


@pytest.fixture(scope="module")
def prompts(small_config: PPOConfig, tiny_tokenizer) -> list[PromptRecord]:
    return all_prompts(small_config, tiny_tokenizer)


def test_the_engine_makes_room_for_checkpoints(tmp_path):
    calls = []
    worker = HybridWorker.__new__(HybridWorker)
    worker.rollout = SimpleNamespace(sleep=lambda: calls.append("sleep"))
    worker.checkpoints = SimpleNamespace(start=lambda *_: calls.append("save"), load=lambda *_: calls.append("load"))
    worker.save(tmp_path, False, True)
    worker.load(tmp_path, 3)
    assert calls == ["sleep", "save", "sleep", "load"]


def test_no_moments_exist_when_the_engine_looks_for_memory(ray_session, small_config, tmp_path):
    # On a GPU vLLM starts only where its share is free, which moments would take from it.
    config = changed(small_config, algorithm={"adv_estimator": "gae"})
    folder = tmp_path / ".global_step_1.attempt_0.x.unfinished"
    folder.mkdir()
    started = [("engine starts", 0), ("engine runs", 0)]
    first = start_group(config, 1, worker="NotingWorker")
    assert first.run("noted") == [[*started, ("now", 0)]]
    first.run("step")
    ((*_, (_, learned)),) = first.run("noted")
    assert learned > 50
    first.run("save", folder, False, False)
    first.run("finish_save", True)
    first.close()
    # A run that resumes loads them into workers whose engine has started, and sleeps.
    second = start_group(config, 1, worker="NotingWorker")
    second.run("load", folder, 1)
    assert second.run("noted") == [[*started, ("engine sleeps", 0), ("now", learned)]]
    second.close()


def test_responses_end_at_the_stop_tokens_of_the_prompts_template(small_config):
    tokenizer = make_tiny_tokenizer()
    tokenizer.add_tokens(["</s>", "<|endoftext|>"])
    # The model cannot sample these.
    assert end_tokens(changed(small_config, data={"template": "abel"}), tokenizer) == [2]
    small_config = replace(small_config, model=replace(small_config.model, override_config={"vocab_size": 264}))
    # The model's own end is 2, "</s>" is 262 and "<|endoftext|>" 263.
    expected = {"chat": [2], "raw": [2], "abel": [2, 262, 263], "qwen-boxed": [2, 263], "mistral": [2, 262]}
    for name, ids in expected.items():
        assert end_tokens(changed(small_config, data={"template": name}), tokenizer) == ids
    more = changed(small_config, data={"template": "mistral"}, rollout={"stop_token_ids": [7]})
    assert end_tokens(more, tokenizer) == [2, 7, 262]
    # No text shows a special token, so that a string to stop at would never be found.
    asked = changed(small_config, rollout={"stop": ["<|endoftext|>", "\nQuestion:"]})
    assert end_tokens(asked, tokenizer) == [2, 263]


VARIANTS = {
    "ppo_clip": {},
    "dual clip, tokens reweighed": {"clip_ratio_c": 1.5, "tis_level": "token", "tis_cap": 1.1},
    "gspo, sequence mean": {"policy_loss": "gspo", "loss_agg_mode": "seq-mean-token-mean"},
    "cispo, sequence sum": {"policy_loss": "cispo", "loss_agg_mode": "seq-mean-token-sum", "tis_level": "sequence"},
    "straight-through KL, weighted": {
        "use_kl_loss": True,
        "kl_loss_coef": 1.0,
        "kl_loss_type": "k3+",
        "use_unbiased_kl": True,
    },
    "constant length, entropy": {"loss_agg_mode": "seq-mean-token-sum-norm", "entropy_coeff": 0.01},
}

BY_TOKENS = {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 90, "log_prob_max_token_len_per_gpu": 200}
SPLITS = [
    ("one", {"micro_batch_size_per_gpu": 64}),
    ("one", {"micro_batch_size_per_gpu": 3, "log_prob_micro_batch_size_per_gpu": 7}),
    ("one", BY_TOKENS),
    ("two", {"micro_batch_size_per_gpu": 64}),
    ("two", {"micro_batch_size_per_gpu": 5}),
    ("two", BY_TOKENS),
]
"""Workers, and how large their micro-batches are; all with the first variant, with the others the first and last."""


def test_gradient_does_not_depend_on_micro_batches_or_ranks(one, two, prompts, small_config):
    rollout = sample(one, prompts, small_config.rollout.train_kwargs, 1)
    policy = scored(one, rollout)
    logprobs, entropy = policy.logprobs, policy.entropy
    assert (entropy > 0).all()
    # Far enough from the old policy for clipping to matter.
    torch.manual_seed(1)
    batch = policy_batch(rollout, logprobs + 0.3 * torch.randn(logprobs.shape))
    num_tokens = len(logprobs)
    first = None
    for name, changes in VARIANTS.items():
        gradients = []
        for group, split in SPLITS if first is None else SPLITS[:: len(SPLITS) - 1]:
            workers, balance = {"one": one, "two": two}[group], "use_dynamic_bsz" in split
            workers.run("configure_actor", small_config.actor, changes | split)
            role = RoleWorkers(workers, balance=balance)
            gradients.append(role.run_update("gradients", batch, num_tokens, len(batch)))
            found = role.map_rows("compute_logprobs", rollout)
            torch.testing.assert_close(found.logprobs, logprobs, atol=1e-5, rtol=0)
        assert max(g.abs().max() for g in gradients[0].values()) > 0
        # So few rows that the second worker gets one to fill its share, or nothing else.
        few = batch[:5] if first is None else batch[:1]
        sizes = (len(few.learn_mask), len(few))
        alone, shared = (RoleWorkers(group).run_update("gradients", few, *sizes) for group in (one, two))
        assert relative_difference(alone, shared) < 1e-5, name
        for other in gradients[1:]:
            assert relative_difference(gradients[0], other) < 1e-5, name
        first = first or gradients[0]
        assert name == "ppo_clip" or relative_difference(first, gradients[0]) > 1e-3, name
    for group in (one, two):
        group.run("configure_actor", small_config.actor, {})


def test_the_first_update_needs_no_pass_of_its_own_for_old_log_probabilities(one, two, prompts, small_config):
    rollout = sample(one, prompts, small_config.rollout.train_kwargs, 1)
    old = scored(one, rollout)
    known = policy_batch(rollout, old.logprobs)
    # Half of the second response, and the whole of the third, are not learned from; they are scored all the same.
    kept = known.padded("learn_mask")
    kept[1, known.response_lengths[1] // 2 :] = False
    kept[2] = False
    known.fill(learn_mask=kept)
    unknown = known.without("old_logprobs")
    counts = (int(known.learn_mask.sum()), len(known) - 1)
    losses = [{"policy_loss": "ppo_clip", "tis_level": "sequence"}, {"policy_loss": "gspo", "entropy_coeff": 0.1}]
    for group, split in (("one", {}), ("two", {"micro_batch_size_per_gpu": 5}), ("two", BY_TOKENS)):
        workers = {"one": one, "two": two}[group]
        for loss in losses:
            workers.run("configure_actor", small_config.actor, loss | split)
            role = RoleWorkers(workers, balance="use_dynamic_bsz" in split)
            expected = role.run_update("gradients", known, *counts)
            found, scores = role.run_scoring_update("gradients_on_policy", unknown, *counts)
            assert relative_difference(expected, found) < 1e-5, (group, loss)
            torch.testing.assert_close(scores.logprobs, old.logprobs, atol=1e-5, rtol=0)
            torch.testing.assert_close(scores.entropy, old.entropy, atol=1e-5, rtol=0)
    for workers in (one, two):
        workers.run("configure_actor", small_config.actor, {})


def test_responses_do_not_depend_on_the_worker_that_samples_them(one, two, prompts, small_config, monkeypatch):
    sampling = small_config.rollout.train_kwargs
    alone = sample(one, prompts, sampling, 7)
    shared = sample(two, prompts, sampling, 7)
    other_seed = sample(one, prompts, sampling, 8)
    assert torch.equal(alone.tokens, shared.tokens)
    assert alone.tokens.tolist() != other_seed.tokens.tolist()
    # Responses of one prompt are draws of their own.
    assert len({tuple(row.tokens.tolist()) for row in alone[: sampling.n].split(1)}) == sampling.n
    # Engines that take a few responses at a time from the queue, and return what has ended after a few steps.
    call, parts = two.run, []
    few = {"start_generation": [EngineRoom(3, 9)] * 2}
    monkeypatch.setattr(two, "run", lambda method, *arguments: few.get(method) or call(method, *arguments))
    monkeypatch.setattr("verl.single_controller.generation.STEPS_PER_CALL", 5)
    for deterministic in (True, False):
        dealt = sample(two, prompts, sampling, 7, deterministic=deterministic, on_finished=parts.append)
        assert torch.equal(alone.tokens, dealt.tokens)
    assert len(parts) > 20
    assert sorted(row for part in parts for row in part.request.tolist()) == sorted(2 * list(range(len(alone))))


def test_rank_metrics_are_those_of_the_states(one, two, prompts, small_config, tiny_model):
    rollout = sample(two, prompts, small_config.rollout.train_kwargs, 3)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    calculator = RepresentationMetricsCalculator(small_config.calculator)
    assert small_config.calculator.layers == [0, -1]
    # What leaves a worker knows of hidden states only metrics and means.
    assert set(rollout.names) == {"tokens", "rollout_logprobs", "truncated", "rank_metrics"}
    assert rollout.rank_metrics.by_prefix is None
    for row in (0, 17, 63):
        episode = rollout[[row]]
        length = episode.longest_response
        with torch.no_grad():
            states = model(episode.tokens[None], output_hidden_states=True).hidden_states
        used = torch.stack([states[1][0], states[-1][0]], dim=1)[None, -length - 1 : -1]
        for layer, expected in enumerate(calculator(used, torch.ones(1, length)).values()):
            for name, value in expected.items():
                measured = rollout.rank_metrics.by_name[name][row, layer]
                assert abs(measured - value.item()) < 1e-3 * max(1, abs(value.item())), (row, layer, name)
        torch.testing.assert_close(rollout.rank_metrics.mean_states[row], used[0].mean(dim=0), atol=1e-4, rtol=0)
    # The policy measures what the engine measures.
    plain = scored(one, rollout)
    assert plain.rank_metrics.num_layers == 0
    for group in (one, two):
        group.run("measure_states", small_config.calculator)
        again = scored(group, rollout)
        group.run("measure_states", None)
        torch.testing.assert_close(again.logprobs, plain.logprobs, atol=1e-5, rtol=0)
        torch.testing.assert_close(again.entropy, plain.entropy, atol=1e-5, rtol=0)
        found, expected = again.rank_metrics, rollout.rank_metrics
        assert found.metric_names == expected.metric_names
        torch.testing.assert_close(found.by_name.to_dict(), expected.by_name.to_dict(), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found.mean_states, expected.mean_states, atol=1e-5, rtol=0)
