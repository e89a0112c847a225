import math

import pytest
import torch

from verl.algorithms.kl import KL_ESTIMATORS

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


def test_low_var_kl_is_finite_for_any_log_ratio():
    logprobs = torch.tensor([[-500.0, -1.0, -21.0]], requires_grad=True)
    values = KL_ESTIMATORS["low_var_kl"](logprobs, torch.tensor([[-1.0, -500.0, 0.0]]))
    values.sum().backward()
    top = math.exp(20) - 21
    torch.testing.assert_close(values.detach(), torch.tensor([[top, 498.0, top]]))
    # far above the reference the pull back is 1; past the limit there is none, and never one of the wrong sign
    assert logprobs.grad.tolist() == [[0.0, 1.0, 0.0]]


def test_k1_and_k3_agree_in_expectation():
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    ref = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    exact = float((policy * (policy / ref).log()).sum())
    for name in ("kl", "low_var_kl"):
        assert float((policy * KL_ESTIMATORS[name](policy.log(), ref.log())).sum()) == pytest.approx(exact, rel=1e-12)
