"""The policy's update: its loss, and what it logs."""

import math

import pytest
import torch

from tests.models.models_in_worlds import counts, example
from verl.algorithms.losses import LOSS_AGGREGATIONS, BatchSize
from verl.batch.flat import positions_within


@pytest.mark.parametrize("mode", LOSS_AGGREGATIONS)
def test_logged_policy_loss_is_the_optimised_one(make_actor, mode: str):
    actor, batch = make_actor(temperature=0.8, loss_agg_mode=mode, micro_batch_size_per_gpu=3), example()
    # Every ratio is 1, so the loss of a token is its negative advantage.
    batch.fill(old_logprobs=actor.compute_logprobs(batch).logprobs)
    size = BatchSize(*counts(batch), max_length=9)
    expected = LOSS_AGGREGATIONS[mode](-batch.padded("advantages"), batch.mask, size)
    metrics = actor.update(batch, size.num_tokens, size.num_sequences)
    assert metrics["actor/pg_loss"] == pytest.approx(expected.item(), rel=1e-5)


BYPASS = {"bypass_mode": True, "policy_loss": "gpg", "temperature": 0.8, "micro_batch_size_per_gpu": 3}


def test_bypass_mode_weights_tokens_by_the_learning_policy(make_actor):
    correction = {"rollout_is": "token", "rollout_is_threshold": 1.5}
    actor, batch = make_actor(correction=correction, **BYPASS), example()
    logprobs = actor.compute_logprobs(batch).logprobs
    # The engine's probabilities of first tokens are half the policy's, so that weights are cut to 1.5, else equal.
    first = positions_within(batch.response_lengths) == 0
    engine = logprobs - math.log(2) * first
    batch.fill(rollout_logprobs=engine, old_logprobs=engine)
    num_tokens, num_sequences = counts(batch)
    weights = torch.where(first, 1.5, 1.0)
    loss = -(batch.advantages * logprobs * weights).sum() / num_tokens
    metrics = actor.update(batch, num_tokens, num_sequences)
    assert metrics["actor/pg_loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert metrics["actor/tis_weight"] == pytest.approx(weights.mean().item(), rel=1e-4)
    assert metrics["actor/ppo_kl"] == pytest.approx(-math.log(2) * num_sequences / num_tokens, rel=1e-3)


def test_bypass_mode_weights_responses_by_all_their_tokens(make_actor):
    correction = {"rollout_is": "sequence", "rollout_is_threshold": 2.0}
    actor, batch = make_actor(correction=correction, **BYPASS), example()
    logprobs = actor.compute_logprobs(batch).logprobs
    batch.fill(rollout_logprobs=logprobs, old_logprobs=logprobs)
    # A rejected token is not learned from, but was sampled: the policies are still equal.
    batch.learn_mask[1] = False
    metrics = actor.update(batch, *counts(batch))
    assert metrics["actor/tis_weight"] == pytest.approx(1.0, rel=1e-4)
