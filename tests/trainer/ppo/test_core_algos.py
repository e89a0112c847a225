from typing import Any, get_args, get_type_hints

import pytest
import torch

from verl.algorithms import advantages, kl, losses
from verl.config.actor import ActorConfig
from verl.config.policy_losses import LOSS_OPTIONS
from verl.config.signal import AdvEstimator, KLType
from verl.trainer.ppo import core_algos

REWARDS = torch.tensor([[0.0, 1.0], [0.0, 3.0], [2.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
MASK = torch.tensor([[1, 1], [1, 1], [1, 0], [1, 1]])
GROUPS = torch.tensor([7, 7, 8, 8])
VALUES = torch.tensor([[0.5, 1.0], [0.0, 2.0], [1.0, 9.0], [0.0, -1.0]], dtype=torch.float64)
GREEDY = torch.tensor([1.0, 1.0, 0.5, 0.5], dtype=torch.float64)
LEARNED = torch.tensor([[1, 1], [0, 0], [1, 0], [1, 1]])
OPTIONS = core_algos.EstimatorOptions(
    norm_by_std=False,
    gamma=0.5,
    lam=0.9,
    learned_mask=LEARNED,
    values=VALUES,
    greedy_scores=GREEDY,
    variances=VALUES.square(),
)
BASELINE_ADVANTAGES = advantages.reinforce_plus_plus_baseline_advantages(REWARDS, MASK, GROUPS, LEARNED)


def token_baseline(zero_tail: bool) -> torch.Tensor:
    return advantages.optimal_token_baseline_advantages(REWARDS, MASK, GROUPS, VALUES.square(), zero_tail)


GAE, RETURNS = advantages.gae_advantages(REWARDS, VALUES, MASK, 0.5, 0.9)


@pytest.mark.parametrize(
    ("implemented", "schema", "field"),
    [
        (core_algos.LOSS_AGGREGATIONS, ActorConfig, "loss_agg_mode"),
    ],
)
def test_the_config_offers_what_is_implemented(implemented: dict[str, Any], schema: type, field: str):
    hint = get_type_hints(schema)[field]
    choices = get_args(hint)[0] if type(None) in get_args(hint) else hint  # X | None
    assert sorted(implemented) == sorted(get_args(choices))


def test_the_estimators_that_have_names_are_implemented():
    assert sorted(core_algos.ADVANTAGE_ESTIMATORS) == sorted(get_args(AdvEstimator))
    assert sorted(core_algos.KL_ESTIMATORS) == sorted(get_args(KLType))


def test_the_names_of_the_paper_mean_what_they_say():
    named = {"ppo_clip": losses.ppo_clip_loss, "gspo": losses.gspo_loss, "cispo": losses.cispo_loss}
    named |= {"gmpo": losses.gmpo_loss, "gpg": losses.gpg_loss, "sapo": losses.sapo_loss}
    named |= {"clip_cov": losses.clip_cov_loss, "kl_cov": losses.kl_cov_loss}
    assert named == core_algos.POLICY_LOSSES
    assert sorted(named) == sorted(LOSS_OPTIONS)
    assert core_algos.KL_ESTIMATORS["low_var_kl"] is kl.low_var_kl


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", advantages.grpo_advantages(REWARDS, MASK, GROUPS, False)),
        ("rloo", advantages.rloo_advantages(REWARDS, MASK, GROUPS)),
        ("reinforce_plus_plus", advantages.reinforce_plus_plus_advantages(REWARDS, LEARNED, 0.5)),
        ("reinforce_plus_plus_baseline", BASELINE_ADVANTAGES),
        ("remax", advantages.remax_advantages(REWARDS, MASK, GREEDY)),
        ("gae", advantages.whitened(GAE, LEARNED)),
        ("gpg", advantages.gpg_advantages(REWARDS, MASK, GROUPS, LEARNED)),
        ("opo", advantages.opo_advantages(REWARDS, MASK, GROUPS)),
        ("grpo_passk", advantages.grpo_passk_advantages(REWARDS, MASK, GROUPS, False)),
        ("optimal_token_baseline", token_baseline(False)),
        ("tir_optimal_token_baseline", token_baseline(True)),
    ],
)
def test_estimators_by_name(name, expected):
    estimate = core_algos.ADVANTAGE_ESTIMATORS[name](REWARDS, MASK, GROUPS, OPTIONS)
    assert torch.equal(estimate.advantages, expected)
    assert torch.equal(estimate.returns, RETURNS) if name == "gae" else estimate.returns is None


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_what_is_not_learned_from_shifts_no_whitened_advantage(name):
    estimate = core_algos.ADVANTAGE_ESTIMATORS[name](REWARDS, MASK, GROUPS, OPTIONS).advantages
    learned = estimate[LEARNED.bool()]
    assert abs(learned.mean()) < 1e-12 and abs(learned.std() - 1) < 1e-6
    assert (estimate[1] == 0).all()


def test_aggregations_by_name():
    # Three responses of 2, 2 and 1 tokens in a step of 10 tokens and 4 responses of at most 8 tokens.
    loss, mask = REWARDS[:3], MASK[:3]
    size = losses.StepSize(num_tokens=10, num_sequences=4, max_length=8)
    results = {name: float(reduce(loss, mask, size)) for name, reduce in core_algos.LOSS_AGGREGATIONS.items()}
    expected = {"token-mean": 6 / 10, "seq-mean-token-mean": (0.5 + 1.5 + 2.0) / 4}
    assert results == expected | {"seq-mean-token-sum": 6 / 4, "seq-mean-token-sum-norm": 6 / 32}
