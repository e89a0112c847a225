"""What the policy's update logs."""

import math

import pytest
import torch
from tensordict import TensorDict

from tests.conftest import changed
from tests.models.models_in_worlds import example, rollout_of
from verl.algorithms.losses import LOSS_AGGREGATIONS, StepSize
from verl.workers.actor import Actor


@pytest.mark.parametrize("mode", LOSS_AGGREGATIONS)
def test_the_logged_policy_loss_is_the_one_optimised(small_config, model_config, single_mesh, mode: str):
    config = changed(small_config.actor, loss_agg_mode=mode, use_kl_loss=False, micro_batch_size_per_gpu=3)
    actor = Actor(config, model_config, single_mesh, 0.8, 10, max_response_length=9)
    batch = example()
    # Every ratio is 1, so the loss of a token is its negative advantage.
    batch.old_logprobs = actor.compute_logprobs(rollout_of(batch)).logprobs
    size = StepSize(int(batch.response_mask.sum()), int(batch.response_mask.any(dim=1).sum()), max_length=9)
    expected = LOSS_AGGREGATIONS[mode](-batch.advantages, batch.response_mask, size)
    metrics = actor.update(batch, size.num_tokens, size.num_sequences)
    assert metrics["actor/pg_loss"] == pytest.approx(expected.item(), rel=1e-5)


def test_with_bypass_mode_weights_are_those_of_the_policy_as_it_learns(small_config, model_config, single_mesh):
    options = {"bypass_mode": True, "policy_loss": "gpg", "tis_level": "token", "tis_cap": 1.5, "use_kl_loss": False}
    actor = Actor(changed(small_config.actor, **options), model_config, single_mesh, 0.8, 10, max_response_length=9)
    batch = example()
    scores = actor.compute_logprobs(rollout_of(batch))
    mask = batch.response_mask.bool()
    # The engine's probabilities are half the policy's in the first column, so that weights are cut to 1.5, else equal.
    batch.rollout_logprobs = scores.logprobs - torch.tensor([math.log(2)] + [0.0] * (mask.shape[1] - 1))
    batch.old_logprobs = batch.rollout_logprobs
    size = StepSize(int(mask.sum()), int(mask.any(dim=1).sum()), max_length=9)
    weights = torch.tensor([1.5] + [1.0] * (mask.shape[1] - 1)).expand_as(mask)
    loss = -(batch.advantages * scores.logprobs * weights)[mask].sum() / size.num_tokens
    metrics = actor.update(batch, size.num_tokens, size.num_sequences)
    assert metrics["actor/pg_loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert metrics["actor/tis_weight"] == pytest.approx(weights[mask].mean().item(), rel=1e-4)
    assert metrics["actor/ppo_kl"] == pytest.approx(-math.log(2) * mask[:, 0].sum().item() / size.num_tokens, rel=1e-3)


def test_with_bypass_mode_a_response_s_weight_is_that_of_all_it_sampled(small_config, model_config, single_mesh):
    options = {"bypass_mode": True, "policy_loss": "gpg", "tis_level": "sequence", "tis_cap": 2.0, "use_kl_loss": False}
    actor = Actor(changed(small_config.actor, **options), model_config, single_mesh, 0.8, 10, max_response_length=9)
    batch = example()
    batch.rollout_logprobs = batch.old_logprobs = actor.compute_logprobs(rollout_of(batch)).logprobs
    # A rejected token is not learned from, but was sampled: the policies are still equal.
    batch.response_mask = batch.response_mask.clone()
    batch.response_mask[0, 1] = 0
    num_tokens, num_sequences = int(batch.response_mask.sum()), int(batch.response_mask.any(dim=1).sum())
    metrics = actor.update(batch, num_tokens, num_sequences)
    assert metrics["actor/tis_weight"] == pytest.approx(1.0, rel=1e-4)


def test_statistics_before_the_update_are_those_of_the_update(small_config, model_config, single_mesh):
    options = {"policy_loss": "verl.recipes.rover:rover_loss", "use_kl_loss": False, "micro_batch_size_per_gpu": 3}
    config = changed(small_config.actor, **options, log_prob_micro_batch_size_per_gpu=5)
    actor = Actor(config, model_config, single_mesh, 0.8, 10, max_response_length=9)
    batch = example()
    scores = actor.compute_logprobs(rollout_of(batch), statistics=["mean_logprob", "logsumexp"])
    assert list(scores.statistics.keys()) == ["mean_logprob", "logsumexp"]
    mean, mask = scores.statistics["mean_logprob"], batch.response_mask.bool()
    # Of tokens that are nearly equally likely, the logarithm of the mean probability is a little above.
    likely = -math.log(actor.model.config.vocab_size)
    assert (mean[mask] < likely).all() and (mean[mask] > likely - 1).all() and not mean[~mask].any()
    batch.old_logprobs = scores.logprobs
    batch.extra = TensorDict({"old mean_logprob": mean}, batch_size=[len(batch)])
    # Q and the values of the next tokens are 0, and what is left is the reward.
    metrics = actor.update(batch, int(mask.sum()), int(mask.any(dim=1).sum()))
    assert metrics["actor/pg_loss"] == pytest.approx(batch.advantages[mask].square().mean().item(), rel=1e-4)
    assert metrics["actor/rover_next_value"] == pytest.approx(0, abs=1e-5)
