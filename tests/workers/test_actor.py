"""The policy's loss of one micro-batch, with the forward pass's results given."""

import math
from types import SimpleNamespace

import pytest
import torch

from verl.algorithms.losses import StepSize
from verl.batch import Batch
from verl.config import PPOConfig, load_config
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
    old, ones = torch.tensor([-1.0, -1.0]), torch.ones(2)
    micro = Batch.of([[1]], [[1, 1]], learn_mask=ones.bool(), old_logprobs=old, advantages=ones)
    micro.fill(ref_logprobs=old, rollout_logprobs=old - torch.tensor([math.log(2), -math.log(2)]))
    actor.forward = SimpleNamespace(logprobs=lambda *_, **__: micro.columns().fill(logprobs=old, entropy=ones))
    loss, metrics = actor._loss(micro, StepSize(2, 1, 8))
    assert loss.item() == pytest.approx(expected)
    assert metrics["tis_weight"].item() == pytest.approx(2.5)
