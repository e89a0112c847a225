import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algorithms.kl import KL_ESTIMATORS, AdaptiveKLController, FixedKLController, kl_penalised_rewards


def test_fixed_coefficient_never_moves():
    controller = FixedKLController(0.05)
    controller.update(1000.0, 256)
    assert controller.coef == 0.05
    assert controller.state_dict() == {"coef": 0.05}
    # the configuration wins over the checkpoint
    controller.load_state_dict({"coef": 0.3})
    assert controller.coef == 0.05


def test_literal_updates_of_the_adaptive_coefficient():
    controller = AdaptiveKLController(init=0.2, target=6.0, horizon=10000)
    controller.update(6.6, 1000)  # error 0.1, factor 1.01
    assert controller.coef == pytest.approx(0.202, rel=1e-12)
    controller.update(60.0, 1000)  # error 9, clipped to 0.2: factor 1.02
    assert controller.coef == pytest.approx(0.20604, rel=1e-12)
    controller.update(0.0, 5000)  # error -1, clipped to -0.2: factor 0.9
    assert controller.coef == pytest.approx(0.185436, rel=1e-12)
    controller.update(6.0, 5000)
    assert controller.coef == pytest.approx(0.185436, rel=1e-12)
    # k1 estimates may be negative
    controller.update(-3.0, 5000)
    assert controller.coef == pytest.approx(0.1668924, rel=1e-12)


def test_state_survives_json():
    first = AdaptiveKLController(0.1, 0.02, 1000)
    for kl in (0.013, 0.031, 0.07):
        first.update(kl, 96)
    second = AdaptiveKLController(0.5, 0.02, 1000)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.coef == first.coef != 0.1
    first.update(0.011, 96)
    second.update(0.011, 96)
    assert second.coef == first.coef


@pytest.mark.parametrize(
    "state",
    [
        *({}, [], None, {"coef": 0.1, "target": 6.0}),
        *({"coef": value} for value in ("0.1", True, None, -0.1, math.nan, math.inf)),
    ],
)
def test_malformed_state_is_refused_and_changes_nothing(state):
    for controller in (FixedKLController(0.25), AdaptiveKLController(0.25, 6.0, 100)):
        with pytest.raises(ValueError, match="KL controller state.*coef"):
            controller.load_state_dict(state)
        assert controller.coef == 0.25
    with pytest.raises(ValueError, match="coef=0.0"):
        controller.load_state_dict({"coef": 0})
    assert controller.coef == 0.25


def test_updates_that_would_spoil_the_coefficient_are_refused():
    controller = AdaptiveKLController(0.1, 6.0, 100)
    with pytest.raises(ValueError, match="current_kl"):
        controller.update(math.nan, 10)
    for num_steps in (0, -5, 500, math.nan):
        with pytest.raises(ValueError, match=r"num_steps=.*larger horizon than 100\.0"):
            controller.update(6.0, num_steps)
    assert controller.coef == 0.1
    controller.update(0.0, 499)
    assert 0 < controller.coef < 0.1


@given(st.floats(1e-3, 10), st.floats(1e-3, 100), st.lists(st.floats(-1e3, 1e3), max_size=20), st.floats(0.01, 4.9))
@settings(max_examples=60, deadline=None)
def test_coefficient_stays_positive_and_moves_towards_the_target(init, target, divergences, share):
    controller = AdaptiveKLController(init, target, 1000)
    for kl in divergences:
        before = controller.coef
        controller.update(kl, share * 1000)
        assert 0 < controller.coef < math.inf
        assert before * (1 - 0.2 * share) * (1 - 1e-9) <= controller.coef <= before * (1 + 0.2 * share) * (1 + 1e-9)
        if kl > target * 1.001:
            assert controller.coef > before
        elif kl < target * 0.999:
            assert controller.coef < before


LOG2 = math.log(2)


@pytest.mark.parametrize(
    ("kl_type", "expected", "mean"),
    [
        # log ratios log 2, -log 2 | log 2; coefficient 0.5
        ("kl", [[-LOG2 / 2, 1 + LOG2 / 2], [2 - LOG2 / 2, 0.0]], LOG2 / 2),
        ("abs", [[-LOG2 / 2, 1 - LOG2 / 2], [2 - LOG2 / 2, 0.0]], LOG2),
        ("mse", [[-(LOG2**2) / 4, 1 - LOG2**2 / 4], [2 - LOG2**2 / 4, 0.0]], LOG2**2 / 2),
        (
            "low_var_kl",
            [[0.25 - LOG2 / 2, 0.5 + LOG2 / 2], [2.25 - LOG2 / 2, 0.0]],
            # per response: (log 2 - 1/2 + 1 - log 2) / 2 and log 2 - 1/2
            (0.25 + LOG2 - 0.5) / 2,
        ),
    ],
)
def test_literal_rewards(kl_type, expected, mean):
    nan = math.nan
    ref = torch.tensor([[-3.0, -3.0], [-3.0, -math.inf]], dtype=torch.float64)
    logprobs = torch.tensor([[LOG2 - 3, -LOG2 - 3], [LOG2 - 3, nan]], dtype=torch.float64, requires_grad=True)
    token_rewards = torch.tensor([[0.0, 1.0], [2.0, nan]], dtype=torch.float64)
    mask = torch.tensor([[1, 1], [1, 0]])
    rewards, mean_kl = kl_penalised_rewards(token_rewards, logprobs, ref, mask, 0.5, kl_type)
    torch.testing.assert_close(rewards, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-15)
    assert mean_kl.item() == pytest.approx(mean, rel=1e-12)
    assert mean_kl.shape == ()
    assert not rewards.requires_grad and not mean_kl.requires_grad


def test_no_tokens_give_no_divergence():
    ones = torch.ones(1, 2)
    rewards, mean_kl = kl_penalised_rewards(ones, ones, 2 * ones, 0 * ones, 0.1, "kl")
    assert (rewards.tolist(), mean_kl.item()) == ([[0.0, 0.0]], 0.0)


@given(st.integers(0, 2**31 - 1), st.sampled_from(sorted(KL_ESTIMATORS)), st.floats(0, 3))
@settings(max_examples=60, deadline=None)
def test_padding_never_matters_and_the_penalty_adds_up(seed, kl_type, coef):
    generator = torch.Generator().manual_seed(seed)
    token_rewards, logprobs, ref = torch.randn(3, 5, 4, generator=generator)
    mask = torch.arange(4) < torch.randint(0, 5, (5, 1), generator=generator)
    rewards, mean_kl = kl_penalised_rewards(token_rewards, logprobs, ref, mask, coef, kl_type)
    assert rewards.dtype == torch.float32
    junk = {math.nan: token_rewards, -math.inf: logprobs, 7.0: ref}
    spoilt = [torch.where(mask, t, value) for value, t in junk.items()]
    again, mean_again = kl_penalised_rewards(*spoilt, mask, coef, kl_type)
    assert torch.equal(again, rewards)
    assert torch.equal(mean_again, mean_kl)
    penalty = (torch.where(mask, token_rewards, 0.0) - rewards).double().sum(dim=1) / mask.sum(dim=1).clamp(min=1)
    assert float(penalty.sum()) == pytest.approx(coef * float(mean_kl) * int(mask.any(dim=1).sum()), rel=1e-3, abs=1e-4)
