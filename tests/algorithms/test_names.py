from typing import get_args, get_type_hints

import pytest
import torch

from verl.algorithms import kl, losses
from verl.algorithms.advantages import ADVANTAGE_ESTIMATORS
from verl.algorithms.advantages import estimators as advantages
from verl.config.actor import LOSS_OPTIONS, ActorConfig
from verl.config.signal import ADV_ESTIMATORS, KL_TYPES

REWARDS = torch.tensor([[0.0, 1.0], [0.0, 3.0], [2.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
MASK = torch.tensor([[1, 1], [1, 1], [1, 0], [1, 1]])
GROUPS = torch.tensor([7, 7, 8, 8])
VALUES = torch.tensor([[0.5, 1.0], [0.0, 2.0], [1.0, 9.0], [0.0, -1.0]], dtype=torch.float64)
GREEDY = torch.tensor([1.0, 1.0, 0.5, 0.5], dtype=torch.float64)
LEARNED = torch.tensor([[1, 1], [0, 0], [1, 0], [1, 1]])
OPTIONS = dict(
    norm_by_std=False,
    gamma=0.5,
    lam=0.9,
    learned_mask=LEARNED,
    values=VALUES,
    greedy_scores=GREEDY,
    variances=VALUES.square(),
)
BASELINE_ADVANTAGES = advantages.reinforce_plus_plus_baseline_advantages(REWARDS, MASK, GROUPS, LEARNED)


TOKEN_BASELINE = advantages.optimal_token_baseline_advantages(REWARDS, MASK, GROUPS, VALUES.square())
GAE, RETURNS = advantages.gae_advantages(REWARDS, VALUES, MASK, 0.5, 0.9)


def test_names_in_the_config_are_implemented():
    (aggregations, _) = get_args(get_type_hints(ActorConfig)["loss_agg_mode"])
    assert sorted(losses.LOSS_AGGREGATIONS) == sorted(get_args(aggregations))
    assert sorted(ADVANTAGE_ESTIMATORS) == sorted(ADV_ESTIMATORS)
    assert sorted(kl.KL_ESTIMATORS) == sorted(KL_TYPES)
    assert {name: loss.__name__ for name, loss in losses.POLICY_LOSSES.items()} == {
        name: f"{name}_loss" for name in LOSS_OPTIONS
    }
    assert kl.KL_ESTIMATORS["low_var_kl"] is kl.low_var_kl


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
        ("optimal_token_baseline", TOKEN_BASELINE),
        ("tir_optimal_token_baseline", TOKEN_BASELINE),
    ],
)
def test_estimators_by_name(name, expected):
    estimate, returns = ADVANTAGE_ESTIMATORS[name](REWARDS, MASK, GROUPS, **OPTIONS)
    assert torch.equal(estimate, expected)
    assert torch.equal(returns, RETURNS) if name == "gae" else returns is None


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_masked_tokens_do_not_shift_whitened_advantages(name):
    estimate = ADVANTAGE_ESTIMATORS[name](REWARDS, MASK, GROUPS, **OPTIONS)[0]
    learned = estimate[LEARNED.bool()]
    assert abs(learned.mean()) < 1e-12 and abs(learned.std() - 1) < 1e-6
    assert (estimate[1] == 0).all()


def test_aggregations_by_name():
    # Three responses of 2, 2 and 1 tokens in a step of 10 tokens and 4 responses of at most 8 tokens.
    loss, mask = REWARDS[:3], MASK[:3]
    size = losses.BatchSize(num_tokens=10, num_sequences=4, max_length=8)
    results = {name: float(reduce(loss, mask, size)) for name, reduce in losses.LOSS_AGGREGATIONS.items()}
    expected = {"token-mean": 6 / 10, "token-sum": 6.0, "seq-mean-token-mean": (0.5 + 1.5 + 2.0) / 4}
    assert results == expected | {"seq-mean-token-sum": 6 / 4, "seq-mean-token-sum-norm": 6 / 32}
    divisors = {**dict.fromkeys(results, 4), "token-mean": 10, "token-sum": 1}
    assert {name: size.divisor(name) for name in results} == divisors
