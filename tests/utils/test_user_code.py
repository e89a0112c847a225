"""The one loader of code that options name by import path, and its checks."""

from pathlib import Path

import pytest
import torch

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


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("math:nothing", "f='math:nothing': math has no function or class 'nothing'"),
        ("math:pi", "f='math:pi': math has no function or class 'pi'"),
        ("no_such_module:f", "f='no_such_module:f': importing it raised ModuleNotFoundError: No module named"),
        ("gone.py:f", f"f='gone.py:f': no such file ({Path.cwd()}/gone.py); name a .py file or a module"),
    ],
)
def test_missing_code(path: str, message: str):
    with pytest.raises(ConfigError) as raised:
        load_code(path, "f")
    assert str(raised.value).startswith(message)


def test_a_function_gets_its_kwargs(file: Path):
    assert UserFunction("f", f"{file}:scaled", ["inputs"], {})(3.0) == 6.0
    assert UserFunction("f", f"{file}:scaled", ["inputs"], {"factor": 4.0})(3.0) == 12.0


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        (
            "scaled",
            {"p": 2},
            "got an unexpected keyword argument 'p'; it is called with (inputs) and f_kwargs={'p': 2}",
        ),
        ("get", {}, "too many positional arguments; it is called with (inputs) and f_kwargs={}"),
        ("get", None, "too many positional arguments; it is called with (inputs)"),
        ("Doubling", {}, "is a class; name a function (what has state is a trainer.method)"),
    ],
)
def test_a_function_with_another_signature(file: Path, name, kwargs, message):
    with pytest.raises(ConfigError) as raised:
        UserFunction("f", f"{file}:{name}", ["inputs"], kwargs)
    line = {"scaled": 4, "get": 19}.get(name)
    place = f" ({file}, line {line})" if line else ""
    assert str(raised.value) == f"f='{file}:{name}': {message}{place}"


def test_a_wrong_decorator_is_located_in_the_users_file(tmp_path: Path):
    file = tmp_path / "loss.py"
    source = "from verl.algorithms.losses import policy_loss\n\n@policy_loss(columns='scores')\ndef loss(inputs): ..."
    file.write_text(source)
    with pytest.raises(ConfigError, match=rf"raised ValueError: columns='scores': must be .* \({file}, line 3\)$"):
        load_code(f"{file}:loss", "actor.policy_loss")


def test_errors_name_the_line_of_the_users_file(file: Path):
    with pytest.raises(ConfigError, match=r"mine.py:broken': raised KeyError: 'no such thing' \(.*mine.py, line 8\)$"):
        UserFunction("f", f"{file}:broken", ["inputs"])(1)
    # Of the user's file, not of the library that it called.
    with pytest.raises(ConfigError, match=r"mine.py:misled': raised AttributeError: .* \(.*mine.py, line 17\)$"):
        UserFunction("f", f"{file}:misled", ["inputs"])(torch.zeros(1))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(2, 3), ""),
        (torch.zeros(2), ""),
        (torch.zeros(3), "f: returned shape [3]; expected a tensor of shape [2, 3] or [2]"),
        (torch.zeros(2, dtype=torch.complex64), "f: returned shape [2]; expected a tensor of shape [2, 3] or [2]"),
        ([1.0, 2.0], "f: returned list; expected a tensor of shape [2, 3] or [2]"),
        (torch.tensor([0.0, torch.nan]), "f: returned NaN or infinity in row 1; expected finite numbers"),
    ],
)
def test_results_are_checked(value, message):
    def check():
        check_tensor("f", value, [2, 3], [2])
        check_finite("f", value)

    if not message:
        check()
        return
    with pytest.raises(ConfigError) as raised:
        check()
    assert str(raised.value) == message


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


@pytest.mark.parametrize(
    ("name", "grad", "message"),
    [
        ("total", True, "returned shape []; expected a tensor of shape [1, 3], one value per token"),
        ("frozen", True, "returned no gradient; compute it from logprobs with torch"),
        ("infinite", False, "returned NaN or infinity in row 0; expected finite numbers, for equal inputs too"),
    ],
)
def test_kl_estimates_are_checked(file: Path, name, grad, message):
    with pytest.raises(ConfigError) as raised:
        kl_estimator(f"{file}:{name}", "actor.kl_loss_type", {})(LOGPROBS.clone().requires_grad_(grad), REF)
    assert str(raised.value).endswith(f"mine.py:{name}': {message}")
