"""The policy's loss of one micro-batch, with the forward pass's results given."""

import math
from types import SimpleNamespace

import pytest
import torch

from verl.algorithms.losses import StepSize
from verl.config import PPOConfig, load_config
from verl.models.forward import ScoredTokens
from verl.protocol import PolicyBatch
from verl.workers.actor import Actor
from verl.workers.policy_loss import PolicyLoss


@pytest.mark.parametrize(
    ("policy_loss", "expected"),
    # Weights 2 and 1/2 of one response, whose advantage is 1 and whose ratios are 1: their mean, or geometric mean.
    [("ppo_clip", -1.25), ("gmpo", -1.0)],
)
def test_a_policy_loss_is_weighted_as_it_takes_ratios(policy_loss: str, expected: float):
    options = ["clip_ratio_c=null", "loss_agg_mode=seq-mean-token-mean", "tis_level=token", "tis_cap=4"]
    overrides = [f"actor.{option}" for option in (f"policy_loss={policy_loss}", *options)]
    actor = object.__new__(Actor)
    actor.config = load_config(PPOConfig, "ppo_trainer", overrides).actor
    actor.device, actor.temperature, actor.loss = "cpu", 1.0, PolicyLoss(actor.config)
    actor.kl_type = actor.config.kl_loss_type
    old, ones = torch.tensor([[-1.0, -1.0]]), torch.ones(1, 2)
    actor.forward = SimpleNamespace(logprobs=lambda *_, **__: ScoredTokens(old.clone(), ones, []))
    tokens = torch.ones(1, 3, dtype=torch.int64)
    rollout = old - torch.tensor([[math.log(2), -math.log(2)]])
    micro = PolicyBatch(tokens, tokens, tokens[:, 1:], old, rollout, old, ones, batch_size=[1])
    loss, metrics = actor._loss(micro, StepSize(2, 1, 8))
    assert loss.item() == pytest.approx(expected)
    assert metrics["tis_weight"].item() == pytest.approx(2.5)
