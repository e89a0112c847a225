import pytest
import torch

from verl.algorithms.advantages import optimal_token_baseline_advantages, token_variances


@pytest.mark.parametrize(("zero_tail", "last"), [(False, 0.0), (True, 1.0)])
def test_literal_advantages(zero_tail: bool, last: float):
    # The first response has returns 1, 1, 1 and weights 1, 2, 4, the second returns 0, 0 and weights 3, 5: baselines of
    # 1/4, 2/7 and 1. The third has no others.
    rewards = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 9.0], [2.0, 9.0, 9.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0]])
    variances = torch.tensor([[1.0, 1.0, 2.0], [3.0, 2.0, 9.0], [1.0, 9.0, 9.0]], dtype=torch.float64)
    advantages = optimal_token_baseline_advantages(rewards, mask, torch.tensor([7, 7, 3]), variances, zero_tail)
    expected = torch.tensor([[3 / 4, 5 / 7, last], [-1 / 4, -2 / 7, 0], [2, 0, 0]], dtype=torch.float64)
    torch.testing.assert_close(advantages, expected, rtol=1e-7, atol=1e-8)


def test_the_variance_of_a_token_is_the_squared_norm_of_its_gradient():
    logits = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log().requires_grad_()
    for token, expected in enumerate([0.38, 0.78, 0.98]):
        logprob = logits.log_softmax(0)[token]
        (gradient,) = torch.autograd.grad(logprob, logits)
        assert gradient.square().sum().item() == pytest.approx(expected)
        assert token_variances(logprob, torch.tensor(0.38)).item() == pytest.approx(expected)
