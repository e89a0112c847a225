"""The contract of ``Method``: what the trainer calls, what may be returned, what errors say, and what is saved."""

import json

import pytest
import torch
from conftest import changed

from tests.extending.examples import example
from tests.method.batches import RECORDS, batch_of, method_of
from verl.batch import Batch
from verl.config import ConfigError, PPOConfig, load_config
from verl.method import StepOutcome
from verl.method.calls import MethodCalls

SOURCE = """
import torch
from verl.method import Method

class Seen(Method):
    def __init__(self, scale=1):
        self.scale = scale * self.total_steps  # the attributes are there
        assert self.config.rollout.n == 2 and len(self.prompts) == 8 and self.max_response_length == 16
    def change_rewards(self, batch, rewards):
        return self.scale * rewards + self.step

class Twice(Method):
    def choose_prompts(self, candidates):
        return [candidates[0]] * 2

class Few(Method):
    def choose_prompts(self, candidates):
        return candidates[:1]

class Indices(Method):
    def choose_prompts(self, candidates):
        return [0, 1]

class Raises(Method):
    def choose_prompts(self, candidates):
        return {}[self.step]

class Places(Method):
    def judged(self, batch, round):
        return {2: batch.records[0]}

class Texts(Method):
    def judged(self, batch, round):
        return {0: "a hint"}

class Long(Method):
    def judged(self, batch, round):
        return {0: self.edit_prompt(batch.records[0], "1+" * 200)}

class Columns(Method):
    def learn_from(self, batch):
        return batch.without("learned")

class Nothing(Method):
    def learn_from(self, batch):
        return batch[[]]

class Double(Method):
    def learn_from(self, batch):
        return type(batch).join([batch] * 2)

class Rows(Method):
    def learn_from(self, batch):
        return batch.scores

class Future(Method):
    def learn_from(self, batch):
        return batch.fill(step=batch.step + 1)

class Shape(Method):
    def change_rewards(self, batch, rewards):
        return rewards[:1]

class Infinite(Method):
    def change_rewards(self, batch, rewards):
        return 1 / rewards

class NoArgument(Method):
    def change_rewards(self, batch):
        return 0

class Half(Method):
    def change_rewards(self, batch, rewards):
        return rewards
    def state_dict(self):
        return {}

class Unsaved(Half):
    def state_dict(self):
        return {"file": object()}
    def load_state_dict(self, state):
        pass

class Misspelt(Method):
    def change_reward(self, batch, rewards):
        return rewards

class Forgets(Method):
    def after_step(self, outcome):
        pass

class Part(Method):
    def learn_from(self, batch):
        return batch.fill(learned=batch.correct)

class Plain:
    pass

class NoCandidates(Method):
    candidates_per_prompt = 0
    def choose_prompts(self, candidates):
        return candidates
"""


@pytest.fixture
def make(tmp_path, small_config, tiny_tokenizer):
    (tmp_path / "mine.py").write_text(SOURCE)

    def make(name: str, **kwargs) -> MethodCalls:
        method = method_of(small_config, f"{tmp_path}/mine.py:{name}", tiny_tokenizer, **kwargs)
        method.begin_step(1)
        return method

    return make


def call(method: MethodCalls, name: str):
    batch = batch_of([1.0, 0.0, 0.0, 1.0], lengths=[1, 2, 3, 4], uids=[0, 0, 1, 1])
    arguments = {
        "choose_prompts": (RECORDS[:2],),
        "judged": (batch, 1),
        "learn_from": (batch,),
        "change_rewards": (batch, torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64)),
    }[name]
    return getattr(method, name)(*arguments)


def test_the_built_in_step_is_method_with_nothing_overridden(small_config, tiny_tokenizer):
    method = MethodCalls(changed(small_config, data={"train_batch_size": 2}), tiny_tokenizer, RECORDS, 10)
    batch, rewards = batch_of([1.0, 0.0]), torch.ones(2).double()
    assert method.choose_prompts(RECORDS[:2]) == RECORDS[:2] and method.settings(RECORDS) is None
    assert method.judged(batch, 1) == {} and method.learn_from(batch) == (batch, {})
    assert method.learn_from(batch)[0] is batch and method.change_rewards(batch, rewards) == (rewards, {})
    assert method.state() is None and method.note == "" and method.candidates_per_prompt == 1
    method.load_state(None)


def test_attributes_are_there_before_init_and_the_step_after(make):
    rewards, metrics = call(make("Seen", scale=2), "change_rewards")
    assert rewards.tolist() == [21.0, 1.0, 1.0, 21.0]
    assert metrics == {"change_rewards/mean": 11.0, "change_rewards/change": 10.5}


@pytest.mark.parametrize(
    ("name", "place", "message"),
    [
        (
            "Twice",
            "choose_prompts",
            r"line 13\) returned \[Prompt.*; it must return 2 different ones of the can",
        ),
        ("Few", "choose_prompts", "it must return 2 different ones of the candidates"),
        ("Indices", "choose_prompts", r"line 21\) returned \[0, 1\]; it must return 2 different ones"),
        ("Raises", "choose_prompts", r"raised KeyError: 1 \(.*mine.py, line 26\)"),
        ("Places", "judged", r"returned \{2: .*; it must return a mapping from places of prompts, 0 to 1, to what"),
        ("Texts", "judged", r"returned \{0: 'a hint'\}; it must return a mapping"),
        ("Columns", "learn_from", r"line 41\) returned a batch without the column 'learned'"),
        ("Nothing", "learn_from", "returned 0 responses, 0 of them to learn from; must be from 1 to 8, and at most 4"),
        ("Double", "learn_from", "returned 8 responses, 8 of them to learn from; must be from 1 to 8, and at most 4"),
        ("Rows", "learn_from", r"returned tensor\(.*; it must return a Batch"),
        ("Future", "learn_from", "returned responses of steps that are not 1 to 1"),
        ("Shape", "change_rewards", r"returned shape \[1\]; expected a tensor of shape \[4\]"),
        ("Infinite", "change_rewards", "returned NaN or infinity in row 1; expected finite numbers"),
    ],
)
def test_what_is_returned_is_checked(make, name, place, message):
    with pytest.raises(ConfigError, match=rf"(?s)^trainer.method='.*mine.py:{name}': its {place} .*{message}"):
        call(make(name), place)


def test_an_edited_prompt_must_fit(make):
    with pytest.raises(ConfigError, match=r"^data.max_prompt_length=\d+: trainer.method='.*Long': its judged .* t"):
        call(make("Long"), "judged")


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("NoArgument", {}, r": its change_rewards: too many positional.*; it is called with \(batch, rewards\)$"),
        (
            "Seen",
            {"scael": 1},
            r": got an unexpected keyword argument 'scael'; Seen is made with trainer.method",
        ),
        ("Half", {}, ": define both state_dict and load_state_dict, or neither$"),
        ("Unsaved", {}, r": its state_dict\(\), which may hold what JSON holds and tensors, raised TypeError"),
        (
            "Misspelt",
            {},
            ": overrides none of choose_prompts, sampling, judged, learn_from, change_rewards, after",
        ),
        ("Plain", {}, ": must be a subclass of verl.method.Method$"),
        ("NoCandidates", {}, ": candidates_per_prompt=0: at least 1$"),
    ],
)
def test_mistakes_are_reported_before_training(make, name, kwargs, message):
    with pytest.raises(ConfigError, match=f"^trainer.method='.*mine.py:{name}'{message}"):
        make(name, **kwargs)


def test_options_that_exclude_each_other(make, small_config, tmp_path):
    for option, message in (
        ("+trainer.method_kwargs.a=1", r"^trainer.method_kwargs=\{'a': 1\}: are for your own"),
        ("trainer.method=NearHalf", "^trainer.method='NearHalf': an import path is module:attribute or"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_config(PPOConfig, "ppo_trainer", [option])
    with pytest.raises(ConfigError, match="^algorithm.adv_estimator='remax': .* overrides learn_from"):
        method_of(changed(small_config, algorithm={"adv_estimator": "remax"}), f"{tmp_path}/mine.py:Part")
    with pytest.raises(ConfigError, match="^rollout.seeded=False: .* overrides sampling"):
        method_of(changed(small_config, rollout={"seeded": False}), "verl.recipes.ead:Annealed")


def test_without_state_what_after_step_was_told_is_forgotten(make):
    note = make("Forgets").note
    assert note.endswith("has after_step but no state_dict, so a resumed run forgets what after_step was told")


def test_a_group_may_be_learned_from_in_part(make):
    batch, metrics = call(make("Part"), "learn_from")
    assert batch.learned.tolist() == [True, False, False, True]
    # The same prompt in another step is another group.
    assert batch.group.tolist() == [1 << 32, 1 << 32, (1 << 32) + 1, (1 << 32) + 1]
    assert metrics == {"learn_from/responses": 4.0, "learn_from/learned": 2.0, "learn_from/replayed": 0.0}


def test_the_example_goes_on_from_its_state(tmp_path, small_config, tiny_tokenizer):
    path = f"{example(tmp_path, 'method.py')}:NearHalf"
    method = method_of(small_config, path, tiny_tokenizer, memory=0.25, capacity=2)
    assert method.candidates_per_prompt == 2 and method.note == ""
    method.begin_step(1)
    assert [record.uid for record in method.choose_prompts(RECORDS[:4])] == [0, 1]
    assert method.settings(RECORDS[:2]).temperatures.tolist() == pytest.approx([1.18] * 4 + [1.0])
    # The second group has no correct response, and gets a hint; the first one teaches something, and is kept.
    batch = batch_of([1.0, 0.0, 0.0, 0.0], lengths=[1, 2, 3, 4], uids=[0, 0, 1, 1])
    edited = method.judged(batch, 1)
    assert list(edited) == [1] and edited[1].uid == 1
    assert edited[1].messages[-1]["content"] == "1 (it begins with 7)" and method.judged(batch, 2) == {}
    learned, _ = method.learn_from(batch)
    assert learned.texts == ["text 0", "text 1"]
    rewards, _ = method.change_rewards(batch, torch.zeros(4).double())
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
