"""The contract of ``Method``: what the trainer calls, what may be returned, what errors say, and what is saved."""

import json

import numpy as np
import pytest
import torch
from conftest import changed

from tests.extending.examples import example
from tests.kit import ppo_config
from tests.method.batches import RECORDS, batch_of, method_of
from tests.tables import refusals
from verl.batch import Batch
from verl.config import ConfigError
from verl.method import StepOutcome
from verl.method.calls import MethodCalls

HEAD = """
import torch
from verl.method import Method

"""
INPUTS = {
    "choose_prompts": "candidates",
    "sampling": "records",
    "resample": "batch, round",
    "learn_from": "batch",
    "shape_rewards": "batch, rewards",
    "after_step": "outcome",
}


@pytest.fixture
def make(tmp_path, small_config, tiny_tokenizer):
    """The method ``Mine`` of a file with this source, in step 1."""

    def make(source: str, **kwargs) -> MethodCalls:
        (tmp_path / "mine.py").write_text(HEAD + source)
        method = method_of(small_config, f"{tmp_path}/mine.py:Mine", tiny_tokenizer, **kwargs)
        method.begin_step(1)
        return method

    return make


def overriding(place: str, returned: str) -> str:
    """The source of a class whose ``place``, in line 7 of the file, returns this expression."""
    return f"\nclass Mine(Method):\n    def {place}(self, {INPUTS[place]}):\n        return {returned}\n"


def call(method: MethodCalls, place: str):
    batch = batch_of([1.0, 0.0, 0.0, 1.0], lengths=[1, 2, 3, 4], uids=[0, 0, 1, 1])
    if place == "choose_prompts":
        return method.choose_prompts(RECORDS[:2])
    if place == "sampling":
        return method.settings(RECORDS[:2])
    if place == "resample":
        return method.resample(batch, 1)
    if place == "learn_from":
        return method.learn_from(batch)
    return method.shape_rewards(batch, torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64))


def test_built_in_step_is_method_with_nothing_overridden(small_config, tiny_tokenizer):
    method = MethodCalls(changed(small_config, data={"train_batch_size": 2}), tiny_tokenizer, RECORDS, 10)
    batch, rewards = batch_of([1.0, 0.0]), torch.ones(2).double()
    assert method.choose_prompts(RECORDS[:2]) == RECORDS[:2] and method.settings(RECORDS) is None
    assert method.resample(batch, 1) == {} and method.learn_from(batch) == (batch, {})
    assert method.learn_from(batch)[0] is batch and method.shape_rewards(batch, rewards) == (rewards, {})
    assert method.state() is None and method.note == "" and method.candidates_per_prompt == 1
    method.load_state(None)


SEEN = """
class Mine(Method):
    def __init__(self, scale=1):
        self.scale = scale * self.total_steps  # the attributes are there
        assert self.config.rollout.n == 2 and len(self.prompts) == 8 and self.max_response_length == 16
    def shape_rewards(self, batch, rewards):
        return self.scale * rewards + self.step
"""


def test_attributes_are_there_before_init_and_the_step_after(make):
    rewards, metrics = call(make(SEEN, scale=2), "shape_rewards")
    assert rewards.tolist() == [21.0, 1.0, 1.0, 21.0]
    assert metrics == {"shape_rewards/mean": 11.0, "shape_rewards/change": 10.5}


@pytest.mark.parametrize(("place", "returned", "line"), refusals("method/refusals.txt", "returned"))
def test_return_values_of_a_method_are_checked(make, refused, place: str, returned: str, line: str):
    with refused(f"trainer.method='TMP/mine.py:Mine'{line}"):
        call(make(overriding(place, returned)), place)


def test_edited_prompt_must_fit(make):
    method = make(overriding("resample", "{0: self.edit_prompt(batch.records[0], '1+' * 200)}"))
    with pytest.raises(ConfigError, match=r"^data.max_prompt_length=\d+: trainer.method='.*Mine': its resample .* t"):
        call(method, "resample")


def test_settings_broadcast_over_prompts_and_responses(make):
    made = call(make(overriding("sampling", "{'temperature': [[0.5], [2.0]], 'top_k': 3}")), "sampling")["overrides"]
    values = [(each.temperature, each.top_k, each.top_p) for each in made]
    assert values == [(0.5, 3, 1.0)] * 2 + [(2.0, 3, 1.0)] * 2 and type(made[0].top_k) is int
    made = call(make(overriding("sampling", "{'temperatures': [1.5, 1.25, 1.0]}")), "sampling")
    assert made["overrides"] is None and made["temperatures"].dtype == np.float32
    assert made["temperatures"].tolist() == [1.5, 1.25, 1.0]
    assert call(make(overriding("sampling", "{}")), "sampling") is None


@pytest.mark.parametrize(("body", "kwargs", "line"), refusals("method/refusals.txt", "classes"))
def test_mistakes_are_reported_before_training(make, refused, body: str, kwargs: str, line: str):
    with refused(f"trainer.method='TMP/mine.py:Mine'{line}"):
        make("class Mine(Method):\n    " + body.replace("; ", "\n    "), **eval(kwargs or "{}"))
    with refused("trainer.method='...': must be a subclass of verl.method.Method"):
        make("class Mine:\n    pass")


def test_options_that_exclude_each_other(small_config):
    for option, message in (
        ("+trainer.method_kwargs.a=1", r"^trainer.method_kwargs=\{'a': 1\}: are for your own"),
        ("trainer.method=NearHalf", "^trainer.method='NearHalf': an import path is module:attribute or"),
    ):
        with pytest.raises(ConfigError, match=message):
            ppo_config(option)
    with pytest.raises(ConfigError, match="^algorithm.adv_estimator='remax': .* overrides learn_from"):
        method_of(changed(small_config, algorithm={"adv_estimator": "remax"}), "verl.recipes.rorecomp:ShortFirst")
    with pytest.raises(ConfigError, match="^rollout.seeded=False: .* overrides sampling"):
        method_of(changed(small_config, rollout={"seeded": False}), "verl.recipes.ead:Annealed")


def test_after_step_without_state_dict_is_noted(make):
    note = make(overriding("after_step", "None")).note
    assert note.endswith("has after_step but no state_dict, so a resumed run forgets what after_step was told")


def test_group_may_be_learned_from_in_part(make):
    batch, metrics = call(make(overriding("learn_from", "batch.fill(learned=batch.correct)")), "learn_from")
    assert batch.learned.tolist() == [True, False, False, True]
    # The same prompt in another step is another group.
    assert batch.group.tolist() == [1 << 32, 1 << 32, (1 << 32) + 1, (1 << 32) + 1]
    assert metrics == {"learn_from/responses": 4.0, "learn_from/learned": 2.0, "learn_from/replayed": 0.0}


def test_example_goes_on_from_its_state(tmp_path, small_config, tiny_tokenizer):
    path = f"{example(tmp_path, 'method.py')}:NearHalf"
    method = method_of(small_config, path, tiny_tokenizer, memory=0.25, capacity=2)
    assert method.candidates_per_prompt == 2 and method.note == ""
    method.begin_step(1)
    assert [record.uid for record in method.choose_prompts(RECORDS[:4])] == [0, 1]
    assert method.settings(RECORDS[:2])["temperatures"].tolist() == pytest.approx([1.18] * 4 + [1.0])
    # The second group has no correct response, and gets a hint; the first one teaches something, and is kept.
    batch = batch_of([1.0, 0.0, 0.0, 0.0], lengths=[1, 2, 3, 4], uids=[0, 0, 1, 1])
    edited = method.resample(batch, 1)
    assert list(edited) == [1] and edited[1].uid == 1
    assert edited[1].messages[-1]["content"] == "1 (it begins with 7)" and method.resample(batch, 2) == {}
    learned, _ = method.learn_from(batch)
    assert learned.texts == ["text 0", "text 1"]
    rewards, _ = method.shape_rewards(batch, torch.zeros(4).double())
    assert rewards.tolist() == [0.2, 0.0, 0.0, 0.0]
    method.after_step(StepOutcome(1, [0, 1], [0.5, 0.0], [0.5, 0.0], {}, RECORDS[:2]))

    again = method_of(small_config, path, tiny_tokenizer, memory=0.25, capacity=2)
    again.load_state(json.loads(json.dumps(method.state())))
    for either in (method, again):
        either.begin_step(2)
        assert [record.uid for record in either.choose_prompts(RECORDS[:4][::-1])] == [3, 2]
        learned, metrics = either.learn_from(batch_of([0.0] * 4, uids=[2, 2, 0, 0], step=2))
        assert learned.step.tolist() == [2] * 4 and metrics["learn_from/replayed"] == 0.0
        learned, metrics = either.learn_from(batch_of([0.0, 1.0], uids=[2, 2], step=2))
        assert learned.step.tolist() == [2, 2, 1, 1] and metrics["learn_from/age/mean"] == 1.0
        assert learned.texts == ["text 0", "text 1"] * 2 and learned.records[2] is RECORDS[0]
        assert isinstance(learned, Batch) and either.method.usual_length == 0.9 * 16 + 0.1 * 2.5
    with pytest.raises(ConfigError, match="NearHalf': the checkpoint was written with other code; start a new run$"):
        again.load_state(None)
