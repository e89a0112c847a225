"""Functions and classes of a user's own: what is told before training, and their state."""

from pathlib import Path

import pytest
import torch

from verl.config import ConfigError
from verl.utils.own import OwnCall

SOURCE = """
import torch

def scaled(inputs, factor=2.0):
    return inputs * factor

def broken(inputs):
    raise KeyError("no such thing")

class Counter:
    def __init__(self, start):
        self.count, self.table = start, torch.tensor([start, 0.5])

    def __call__(self, inputs):
        self.count += inputs
        return self.count

    def state_dict(self):
        return {"count": self.count, "table": self.table}

    def load_state_dict(self, state):
        self.count, self.table = state["count"], state["table"]

class NotCalled:
    pass

class Half:
    def __call__(self, inputs):
        return inputs

    def state_dict(self):
        return {}

class Unsaved(Counter):
    def state_dict(self):
        return {"file": object()}

def misled(inputs):
    return torch.nn.functional.mse_loss(inputs, "text")
"""


@pytest.fixture
def own(tmp_path: Path):
    (tmp_path / "own.py").write_text(SOURCE)

    def make(name, **options):
        return OwnCall("a.b", f"{tmp_path}/own.py:{name}", options, ["inputs"])

    return make


def test_a_function_gets_its_options_and_a_class_is_made_with_them(own):
    assert own("scaled")(3.0) == 6.0 and own("scaled", factor=4.0)(3.0) == 12.0
    counter = own("Counter", start=5)
    assert [counter(1), counter(2)] == [6, 8]
    other = own("Counter", start=1)
    other.load_state(counter.state())
    assert other(1) == 9 and torch.equal(other.inner.table, torch.tensor([5, 0.5]))
    assert own("scaled").state() is None


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "scaled",
            {"power": 2},
            "unexpected keyword argument 'power'; it is called with (inputs) and a.b_kwargs=",
        ),
        ("Counter", {}, "missing a required argument: 'start'; Counter is made with a.b_kwargs={}"),
        ("NotCalled", {}, "NotCalled has no __call__(inputs); define it"),
        ("Half", {}, "define both state_dict and load_state_dict, or neither"),
        ("Unsaved", {"start": 0}, "its state_dict(), which may hold what JSON holds and tensors, raised TypeError"),
        ("gone", {}, "has no function or class 'gone'"),
    ],
)
def test_what_cannot_be_called(own, name, options, message):
    with pytest.raises(ConfigError) as raised:
        own(name, **options)
    assert str(raised.value).startswith("a.b='") and message in str(raised.value)


def test_what_it_raises_has_its_place(own):
    with pytest.raises(ConfigError, match=r"own.py:broken': raised KeyError: 'no such thing' \(.*own.py, line 8\)$"):
        own("broken")(1)
    # Of the user's file, not of the library that it called.
    with pytest.raises(ConfigError, match=r"own.py:misled': raised AttributeError: .* \(.*own.py, line 39\)$"):
        own("misled")(torch.zeros(1))


def test_a_state_of_other_code_is_refused(own):
    message = "the checkpoint was written with another a.b; start a new run"
    for call, state in ((own("scaled"), {"count": 1}), (own("Counter", start=0), None)):
        with pytest.raises(ConfigError, match=message):
            call.load_state(state)
