import math

import pytest
import torch

from verl.algorithms.kl import KL_ESTIMATORS, kl_loss

LOG2 = math.log(2)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # policy twice as likely as the reference, half as likely, equal
        ("kl", [LOG2, -LOG2, 0.0]),
        ("abs", [LOG2, LOG2, 0.0]),
        ("mse", [LOG2**2 / 2, LOG2**2 / 2, 0.0]),
        ("low_var_kl", [0.5 + LOG2 - 1, 2 - LOG2 - 1, 0.0]),
    ],
)
def test_literal_values(name, expected):
    ref = torch.tensor([[-3.0, -3.0, -3.0]], dtype=torch.float64)
    logprobs = ref + torch.tensor([LOG2, -LOG2, 0.0], dtype=torch.float64)
    actual = KL_ESTIMATORS[name](logprobs, ref)
    torch.testing.assert_close(actual, torch.tensor([expected], dtype=torch.float64), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("kl", [1.0, 1.0]), ("abs", [1.0, -1.0]), ("mse", [LOG2, -LOG2]), ("low_var_kl", [0.5, -1.0])],
)
def test_literal_gradients(name, expected):
    ref = torch.tensor([[-3.0, -3.0]], dtype=torch.float64)
    logprobs = (ref + torch.tensor([LOG2, -LOG2], dtype=torch.float64)).requires_grad_()
    KL_ESTIMATORS[name](logprobs, ref).sum().backward()
    torch.testing.assert_close(logprobs.grad, torch.tensor([expected], dtype=torch.float64))


def test_the_clamps_of_low_var_kl_are_those_of_verl():
    # Log-ratios ref - policy: -499 and 499 beyond the clamp of 20, exp(3) - 4 = 16.1 beyond 10, exp(2) - 3 within.
    logprobs = torch.tensor([[-1.0, -500.0, -5.0, -4.0, -11.0, -1.0]], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([[-500.0, -1.0, -2.0, -2.0, -1.0, -9.0]], dtype=torch.float64)
    values = KL_ESTIMATORS["low_var_kl"](logprobs, ref)
    values.sum().backward()
    expected = [10.0, 10.0, 10.0, math.exp(2) - 3, 10.0, math.exp(-8) + 7]
    torch.testing.assert_close(values.detach(), torch.tensor([expected], dtype=torch.float64))
    gradient = [0.0, 0.0, 0.0, 1 - math.exp(2), 0.0, 1 - math.exp(-8)]
    torch.testing.assert_close(logprobs.grad, torch.tensor([gradient], dtype=torch.float64))


@pytest.mark.parametrize(("name", "alias"), [("kl", "k1"), ("mse", "k2"), ("low_var_kl", "k3")])
def test_both_of_verls_names_mean_the_same(name, alias):
    assert KL_ESTIMATORS[alias] is KL_ESTIMATORS[name]


@pytest.mark.parametrize("name", ["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"])
def test_a_plus_keeps_the_value_and_has_the_gradient_of_k2(name):
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
    (
        chances * kl_loss(name, logprobs, REFERENCE.log(), None if sampled_from is None else chances.log())
    ).sum().backward()
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
def test_the_mean_gradient_on_policy(name, expected):
    assert expected_gradient(name, None) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "k1+", "k2+", "k3+"])
def test_weighted_by_the_ratio_the_gradient_is_right_off_policy(name):
    assert expected_gradient(name, OLD) == pytest.approx(EXACT, abs=1e-6)


def test_the_log_ratio_of_the_weight_is_clamped():
    logprobs, ref = torch.zeros(1, 2, dtype=torch.float64), torch.full((1, 2), -2.0, dtype=torch.float64)
    weighted = kl_loss("k1", logprobs, ref, torch.tensor([[-30.0, 0.0]], dtype=torch.float64))
    torch.testing.assert_close(weighted, torch.tensor([[2 * math.exp(20), 2.0]], dtype=torch.float64))


def test_k1_and_k3_agree_in_expectation():
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    ref = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    exact = float((policy * (policy / ref).log()).sum())
    for name in ("kl", "low_var_kl"):
        assert float((policy * KL_ESTIMATORS[name](policy.log(), ref.log())).sum()) == pytest.approx(exact, rel=1e-12)
