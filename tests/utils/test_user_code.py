"""The one loader of code that options name by import path, and its checks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tables import refusals
from verl.algorithms.kl import kl_loss, kl_penalised_rewards
from verl.config import ConfigError
from verl.utils.user_code import UserFunction, check_finite, check_tensor, kl_estimator, load_code

SOURCE = """
import torch

def scaled(inputs, factor=2.0):
    return inputs * factor

def broken(inputs):
    raise KeyError("no such thing")

class Doubling:
    def __call__(self, inputs): return 2 * inputs

    @staticmethod
    def double(x): return 2 * x

def misled(inputs):
    return torch.nn.functional.mse_loss(inputs, "text")

def get(): return Doubling

def quartic(logprobs, ref_logprobs, scale=1.0):
    return scale * (logprobs - ref_logprobs) ** 4

def total(logprobs, ref_logprobs):
    return (logprobs - ref_logprobs).sum()

def frozen(logprobs, ref_logprobs):
    return (logprobs - ref_logprobs).detach()

def infinite(logprobs, ref_logprobs):
    return 1 / (logprobs - ref_logprobs)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(SOURCE)
    return tmp_path / "mine.py"


def test_a_module_and_a_file(file: Path):
    assert load_code("math:gcd", "actor.policy_loss")(12, 18) == 6
    assert load_code(f"{file}:Doubling.double", "f")(4) == 8
    # Names of one file share what it holds.
    assert load_code(f"{file}:get", "f")() is load_code(f"{file}:Doubling", "f")
    file.write_text("def get(): return 3\n")
    assert load_code(f"{file}:get", "f")() == 3


def test_a_function_gets_its_kwargs(file: Path):
    assert UserFunction("f", f"{file}:scaled", ["inputs"], {})(3.0) == 6.0
    assert UserFunction("f", f"{file}:scaled", ["inputs"], {"factor": 4.0})(3.0) == 12.0


def test_a_wrong_decorator_is_located_in_the_users_file(tmp_path: Path):
    file = tmp_path / "loss.py"
    source = "from verl.algorithms.losses import policy_loss\n\n@policy_loss(columns='scores')\ndef loss(inputs): ..."
    file.write_text(source)
    with pytest.raises(ConfigError, match=rf"raised ValueError: columns='scores': must be .* \({file}, line 3\)$"):
        load_code(f"{file}:loss", "actor.policy_loss")


LOGPROBS, REF = torch.tensor([[-1.0, -2.0, 0.0]]), torch.tensor([[-3.0, -1.0, 0.0]])


def test_a_kl_estimator_in_the_loss_and_in_the_reward(file: Path):
    assert kl_estimator("k3+", "actor.kl_loss_type", {}) == "k3+"
    quartic = kl_estimator(f"{file}:quartic", "actor.kl_loss_type", {"scale": 0.5})
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


def checked(value: Any) -> None:
    """Check a value that may be [2, 3] or [2]."""
    check_tensor("f", value, [2, 3], [2])
    check_finite("f", value)


@pytest.mark.parametrize(("call", "line"), refusals("utils/refusals.txt"))
def test_wrong_code_is_refused(call: str, line: str, file: Path, refused):
    def kl(name: str, grad: bool) -> Tensor:
        return kl_estimator(f"{file}:{name}", "f", {})(LOGPROBS.clone().requires_grad_(grad), REF)

    def made(name: str, kwargs: dict[str, Any] | None) -> UserFunction:
        return UserFunction("f", f"{file}:{name}", ["inputs"], kwargs)

    checked(torch.zeros(2, 3))
    checked(torch.zeros(2))
    with refused(line, CWD=Path.cwd()):
        eval(call, {"load_code": load_code, "made": made, "kl": kl, "checked": checked, "torch": torch})
