"""AIPO against numbers worked out by hand."""

import torch

from verl.algorithms.losses import POLICY_LOSSES, rollout_weights
from verl.config import PPOConfig, load_config


def test_each_policy_gradient_has_the_capped_ratio_to_the_engine():
    actor = load_config(PPOConfig, "ppo_trainer", ["experiment=aipo"]).actor
    # Probabilities 0.8 against 0.2 and 0.1 against 0.4: ratios of 4, cut to 2, and 0.25.
    policy, engine = torch.tensor([[0.8, 0.1]]).log().requires_grad_(), torch.tensor([[0.2, 0.4]]).log()
    advantages, mask = torch.tensor([[1.5, -2.0]]), torch.ones(1, 2)
    losses, _ = POLICY_LOSSES[actor.policy_loss](policy, engine, advantages, mask, **actor.loss_options)
    weights, _ = rollout_weights(policy.detach(), engine, mask, actor.tis_level, actor.tis_cap)
    (losses * weights).sum().backward()
    torch.testing.assert_close(policy.grad, torch.tensor([[-3.0, 0.5]]))
    # The weights are those of the policy as it learns, and the update has no clip.
    assert actor.bypass_mode and not actor.use_kl_loss
