"""KL estimators, the loss and the rewards made of them, and the controllers of their coefficient."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algorithms.kl import KL_ESTIMATORS, KLController, kl_loss, kl_penalised_rewards

LOG2 = math.log(2)


@pytest.mark.parametrize(
    ("name", "values", "gradient"),
    [
        # Policy twice as likely as the reference, half as likely.
        ("kl", [LOG2, -LOG2], [1.0, 1.0]),
        ("abs", [LOG2, LOG2], [1.0, -1.0]),
        ("mse", [LOG2**2 / 2, LOG2**2 / 2], [LOG2, -LOG2]),
        ("low_var_kl", [0.5 + LOG2 - 1, 2 - LOG2 - 1], [0.5, -1.0]),
    ],
)
def test_literal_values_and_gradients(name, values, gradient):
    ref = torch.tensor([[-3.0, -3.0]], dtype=torch.float64)
    logprobs = (ref + torch.tensor([LOG2, -LOG2], dtype=torch.float64)).requires_grad_()
    actual = KL_ESTIMATORS[name](logprobs, ref)
    torch.testing.assert_close(actual.detach(), torch.tensor([values], dtype=torch.float64), rtol=1e-12, atol=1e-15)
    actual.sum().backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([gradient], dtype=torch.float64))
    assert not KL_ESTIMATORS[name](ref, ref).any()
    alias = {"kl": "k1", "mse": "k2", "low_var_kl": "k3", "abs": "abs"}[name]
    assert KL_ESTIMATORS[alias] is KL_ESTIMATORS[name]


def test_clamps_of_low_var_kl_are_those_of_verl():
    # Log-ratios ref - policy: -499 and 499 beyond the clamp of 20, exp(3) - 4 = 16.1 beyond 10, exp(2) - 3 within.
    logprobs = torch.tensor([[-1.0, -500.0, -5.0, -4.0, -11.0, -1.0]], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([[-500.0, -1.0, -2.0, -2.0, -1.0, -9.0]], dtype=torch.float64)
    values = KL_ESTIMATORS["low_var_kl"](logprobs, ref)
    values.sum().backward()
    expected = [10.0, 10.0, 10.0, math.exp(2) - 3, 10.0, math.exp(-8) + 7]
    torch.testing.assert_close(values.detach(), torch.tensor([expected], dtype=torch.float64))
    gradient = [0.0, 0.0, 0.0, 1 - math.exp(2), 0.0, 1 - math.exp(-8)]
    torch.testing.assert_close(logprobs.grad, torch.tensor([gradient], dtype=torch.float64))


@pytest.mark.parametrize("name", ["kl", "abs", "mse", "low_var_kl"])
def test_plus_variant_keeps_value_with_k2_gradient(name):
    logprobs = torch.tensor([[-3.0 + LOG2, -3.0 - LOG2, -40.0]], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([[-3.0, -3.0, -3.0]], dtype=torch.float64)
    values = KL_ESTIMATORS[f"{name}+"](logprobs, ref)
    torch.testing.assert_close(values, KL_ESTIMATORS[name](logprobs, ref), rtol=0, atol=0)
    values.sum().backward()
    # Where low_var_kl is clamped, at a log-ratio of -37, the pull back is at its strongest.
    torch.testing.assert_close(logprobs.grad, torch.tensor([[LOG2, -LOG2, -37.0]], dtype=torch.float64))


# A policy over three tokens with logits (0.4, -0.2, 0.1), and its reference.
LOGITS = torch.tensor([0.4, -0.2, 0.1], dtype=torch.float64)
REFERENCE = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
OLD = torch.tensor([0.5, 0.4, 0.1], dtype=torch.float64)
EXACT = [0.26045383, -0.00087659, -0.25957724]
"""The gradient of KL(policy || reference) by the logits: p (log p - log p_ref - KL)."""
TOTAL_VARIATION = [0.28262534, 0.15510807, -0.43773341]
"""That of the sum of |p - p_ref|."""


def expected_gradient(name: str, sampled_from: torch.Tensor | None) -> list[float]:
    """The exact mean of the loss's gradient by the logits, over tokens of the policy itself or of ``sampled_from``."""
    logits = LOGITS.clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    chances = logprobs.detach().exp() if sampled_from is None else sampled_from
    old = None if sampled_from is None else chances.log()
    (chances * kl_loss(name, logprobs, REFERENCE.log(), old)).sum().backward()
    return logits.grad.tolist()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("kl", [0.0, 0.0, 0.0]),
        ("abs", TOTAL_VARIATION),
        ("mse", EXACT),
        ("kl+", EXACT),
        ("abs+", EXACT),
        ("low_var_kl+", EXACT),
        ("k3", [0.23675182, 0.03969448, -0.2764463]),
    ],
)
def test_mean_gradient_on_policy(name, expected):
    assert expected_gradient(name, None) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "k1+", "k2+", "k3+"])
def test_ratio_weighted_kl_gradient_is_exact_off_policy(name):
    assert expected_gradient(name, OLD) == pytest.approx(EXACT, abs=1e-6)
    # The weight's log-ratio is clamped to 20.
    logprobs, ref, old = (torch.tensor([[x, y]]).double() for x, y in ((0, 0), (-2, -2), (-30, 0)))
    weighted = kl_loss("k1", logprobs, ref, old)
    torch.testing.assert_close(weighted, torch.tensor([[2 * math.exp(20), 2.0]], dtype=torch.float64))


def test_fixed_coefficient_never_moves():
    controller = KLController("fixed", 0.05, 6.0, 100)
    controller.update(1000.0, 256)
    assert controller.state_dict() == {"coef": 0.05}
    # the configuration wins over the checkpoint
    controller.load_state_dict({"coef": 0.3})
    assert controller.coef == 0.05


def test_literal_updates_of_the_adaptive_coefficient():
    controller = KLController("adaptive", coef=0.2, target=6.0, horizon=10000)
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
    resumed = KLController("adaptive", 0.5, 6.0, 10000)
    resumed.load_state_dict(json.loads(json.dumps(controller.state_dict())))
    assert resumed.coef == controller.coef
    # What would spoil it.
    with pytest.raises(ValueError, match="current_kl"):
        resumed.update(math.nan, 10)
    for num_steps in (0, 50_000, math.nan):
        with pytest.raises(ValueError, match=r"num_steps=.*larger horizon than 10000\.0"):
            resumed.update(6.0, num_steps)
    assert resumed.coef == controller.coef
    resumed.update(0.0, 49_999)
    assert 0 < resumed.coef < controller.coef


@pytest.mark.parametrize(
    "state",
    [
        *({}, [], None, {"coef": 0.1, "target": 6.0}),
        *({"coef": value} for value in ("0.1", True, None, -0.1, math.nan, math.inf)),
    ],
)
def test_malformed_state_is_refused_and_changes_nothing(state):
    for controller in (KLController("fixed", 0.25, 6.0, 100), KLController("adaptive", 0.25, 6.0, 100)):
        with pytest.raises(ValueError, match="KL controller state.*coef"):
            controller.load_state_dict(state)
        assert controller.coef == 0.25
    with pytest.raises(ValueError, match="coef=0.0"):
        controller.load_state_dict({"coef": 0})
    assert controller.coef == 0.25


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
    assert not rewards.requires_grad and not mean_kl.requires_grad


@given(st.integers(0, 2**31 - 1), st.sampled_from(sorted(KL_ESTIMATORS)), st.floats(0, 3))
@settings(max_examples=60, deadline=None)
def test_padding_never_matters_and_the_penalty_adds_up(seed, kl_type, coef):
    generator = torch.Generator().manual_seed(seed)
    token_rewards, logprobs, ref = torch.randn(3, 5, 4, generator=generator)
    mask = torch.arange(4) < torch.randint(0, 5, (5, 1), generator=generator) * (seed % 5 > 0)  # or no token at all
    rewards, mean_kl = kl_penalised_rewards(token_rewards, logprobs, ref, mask, coef, kl_type)
    assert rewards.dtype == torch.float32
    junk = {math.nan: token_rewards, -math.inf: logprobs, 7.0: ref}
    spoilt = [torch.where(mask, t, value) for value, t in junk.items()]
    again, mean_again = kl_penalised_rewards(*spoilt, mask, coef, kl_type)
    assert torch.equal(again, rewards)
    assert torch.equal(mean_again, mean_kl)
    penalty = (torch.where(mask, token_rewards, 0.0) - rewards).double().sum(dim=1) / mask.sum(dim=1).clamp(min=1)
    assert float(penalty.sum()) == pytest.approx(coef * float(mean_kl) * int(mask.any(dim=1).sum()), rel=1e-3, abs=1e-4)
