"""What the policy's update logs."""

import pytest

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
