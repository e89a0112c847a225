"""A selector of one's own, as docs/extending.md has it: refused, asked, told, and restored."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import data_options

from tests.extending.examples import example
from verl.config import ConfigError
from verl.data.prompt_rows import PromptRecord
from verl.data.prompts import PromptCollator, TokenizedPrompts
from verl.data.samplers import StepOutcome
from verl.data.selectors import PromptSelector

BROKEN = """
class Twice:
    def select(self, candidates):
        return [0, 0]

class TooFew:
    def select(self, candidates):
        return [1]

class Outside:
    def select(self, candidates):
        return [0, 6]

class Nothing:
    def select(self, candidates):
        return None

class Raises:
    def select(self, candidates):
        return {}[candidates.step]

class NoSelect:
    pass

class NoArgument:
    def select(self):
        return [0, 1]

class HalfAState(Twice):
    def state_dict(self):
        return {}

class Unsaved(HalfAState):
    def state_dict(self):
        return {"file": open}
    def load_state_dict(self, state):
        pass

def function(candidates):
    return [0, 1]
"""


def prompts(*uids: int) -> TokenizedPrompts:
    records = [PromptRecord(uid, [1] * (uid + 1), "arithmetic", "7", {}, [], False) for uid in uids]
    return PromptCollator(8, 0)(records)


def selector_of(path: Path, name: str, **kwargs: Any) -> PromptSelector:
    options = data_options(train_batch_size=2, selector=f"{path}:{name}", selector_kwargs=kwargs, selector_candidates=3)
    return PromptSelector(options, 10)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Twice", r"its select returned \[0, 0\]; it must return 2 different places of candidates.records, 0 to 5$"),
        ("TooFew", r"its select returned \[1\]; it must return 2 different"),
        ("Outside", r"its select returned \[0, 6\]; it must return 2 different"),
        ("Nothing", "its select returned None; it must return 2 different"),
        ("Raises", r"its select raised KeyError: 4 \(.*broken.py, line 20\)$"),
        ("NoSelect", "the class needs a method select$"),
        ("NoArgument", r"its select must take 1 argument\(s\): too many positional arguments$"),
        ("HalfAState", "define both state_dict and load_state_dict, or neither$"),
        ("Unsaved", r"its state_dict\(\), which may hold what JSON holds and tensors, raised TypeError"),
        ("function", "must be a class with the method select$"),
    ],
)
def test_what_is_wrong_is_told(tmp_path, name, message):
    (tmp_path / "broken.py").write_text(BROKEN)
    with pytest.raises(ConfigError, match=rf"^data.selector='.*broken.py:{name}': {message}"):
        selector_of(tmp_path / "broken.py", name).choose(prompts(*range(6)), 4)


def test_unknown_keywords_and_unused_ones_are_refused(tmp_path):
    file = example(tmp_path, "selector.py")
    with pytest.raises(ConfigError, match=r"^data.selector_kwargs=\{'memry': 1\}: NearHalf: .*argument 'memry'"):
        selector_of(file, "NearHalf", memry=1)
    with pytest.raises(ConfigError, match=r"^selector_kwargs=\{'a': 1\}: are for your own selector"):
        data_options(selector_kwargs={"a": 1})
    with pytest.raises(ConfigError, match=r"^selector='NearHalf': an import path is module:attribute or"):
        data_options(selector="NearHalf")


def test_the_example_learns_what_is_hard_and_is_restored(tmp_path):
    file = example(tmp_path, "selector.py")
    selector = selector_of(file, "NearHalf", memory=0.5)
    chosen = selector.choose(prompts(5, 4, 3, 2, 1, 0), 1)
    assert [record.uid for record in chosen.records] == [5, 4]
    assert chosen.tokens.uid.tolist() == [5, 4]
    assert chosen.tokens.attention_mask.sum(dim=1).tolist() == [6, 5]
    selector.own.call("update", StepOutcome(1, [5, 4, 3], [0.0] * 3, [1.0, 0.75, 0.5], {}))
    selector.own.call("update", StepOutcome(2, [4], [0.0], [0.25], {}))  # (0.75 + 0.25) / 2 is a half
    again = selector_of(file, "NearHalf", memory=0.5)
    again.own.load_state(json.loads(json.dumps(selector.own.state())))
    for either in (selector, again):
        assert [record.uid for record in either.choose(prompts(5, 4), 3).records] == [4, 5]
        assert either.own.inner.accuracy == {"5": 1.0, "4": 0.5, "3": 0.5}
    with pytest.raises(ConfigError, match="the checkpoint was written with another data.selector; start a new run$"):
        again.own.load_state(None)


def test_without_a_choice_order_and_tokens_are_the_candidates(tmp_path):
    (tmp_path / "last.py").write_text("class Last:\n    def select(self, c):\n        return range(5, 3, -1)\n")
    chosen = selector_of(tmp_path / "last.py", "Last").choose(prompts(*range(6)), 1)
    assert [record.uid for record in chosen.records] == [5, 4]
    assert torch.equal(chosen.tokens.input_ids, prompts(5, 4).tokens.input_ids)
