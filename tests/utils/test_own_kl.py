"""A KL estimator of a user's own, in the loss and in the reward."""

from pathlib import Path

import pytest
import torch

from verl.algorithms.kl import kl_loss, kl_penalised_rewards
from verl.config import ConfigError
from verl.utils.own_kl import kl_estimator

SOURCE = """
def quartic(logprobs, ref_logprobs, scale=1.0):
    return scale * (logprobs - ref_logprobs) ** 4

def total(logprobs, ref_logprobs):
    return (logprobs - ref_logprobs).sum()

def frozen(logprobs, ref_logprobs):
    return (logprobs - ref_logprobs).detach()

def infinite(logprobs, ref_logprobs):
    return 1 / (logprobs - ref_logprobs)

class Counting:
    def __call__(self, logprobs, ref_logprobs):
        return logprobs

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass
"""
LOGPROBS, REF = torch.tensor([[-1.0, -2.0, 0.0]]), torch.tensor([[-3.0, -1.0, 0.0]])


@pytest.fixture
def own(tmp_path: Path):
    (tmp_path / "kls.py").write_text(SOURCE)
    return lambda name, **options: kl_estimator(f"{tmp_path}/kls.py:{name}", "actor.kl_loss_type", options)


def test_literals_in_the_loss_and_in_the_reward(own):
    quartic = own("quartic", scale=0.5)
    logprobs = LOGPROBS.clone().requires_grad_()
    loss = kl_loss(quartic, logprobs, REF)
    assert loss.tolist() == [[8.0, 0.5, 0.0]]
    loss.sum().backward()
    assert logprobs.grad.tolist() == [[16.0, -2.0, 0.0]]  # 4 * 0.5 * x^3
    # Off policy the weight has a gradient, too: that of r x^4 / 2 is r (x^4 / 2 + 2 x^3).
    logprobs = LOGPROBS.clone().requires_grad_()
    kl_loss(quartic, logprobs, REF, LOGPROBS - torch.tensor(2.0).log()).sum().backward()
    torch.testing.assert_close(logprobs.grad, 2 * torch.tensor([[8.0 + 16.0, 0.5 - 2.0, 0.0]]))
    rewards, mean = kl_penalised_rewards(torch.zeros(1, 3), LOGPROBS, REF, torch.tensor([[1, 1, 0]]), 0.1, quartic)
    torch.testing.assert_close(rewards, torch.tensor([[-0.8, -0.05, 0.0]]))
    assert mean.item() == 4.25


def test_a_name_stays_a_name():
    assert kl_estimator("k3+", "actor.kl_loss_type", {}) == "k3+"


@pytest.mark.parametrize(
    ("name", "grad", "message"),
    [
        ("total", True, "returned shape (); expected a tensor of shape (1, 3), one value per token"),
        ("frozen", True, "returned a tensor without a gradient; compute it from logprobs with torch"),
        ("infinite", False, "returned NaN or infinity; expected finite numbers, for equal inputs too"),
    ],
)
def test_results_are_checked(own, name, grad, message):
    with pytest.raises(ConfigError) as raised:
        own(name)(LOGPROBS.clone().requires_grad_(grad), REF)
    assert str(raised.value).endswith(f"kls.py:{name}': {message}")


def test_state_that_nobody_would_save_is_refused(own):
    with pytest.raises(
        ConfigError, match="kls.py:Counting': has a state_dict, but the state of this option is not saved"
    ):
        own("Counting")
