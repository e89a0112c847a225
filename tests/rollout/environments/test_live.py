"""First observations in prompts, and environments with TRL's contract, which are repeated elsewhere."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_tokenizer import make_tiny_tokenizer

from tests.kit import data_options, jsonl, user_code
from tests.rollout.kit import RECORD, contents, documented, multi_turn, start, take
from tests.tables import refusals
from verl.config.errors import ConfigError
from verl.config.rollout import MultiTurnConfig
from verl.data.prompts import PromptDataset
from verl.rollout.environments.conversations import THE_END, check_conversations, new_conversations
from verl.rollout.environments.live import LiveEnvironment
from verl.rollout.environments.pool import beginning, load_environment
from verl.rollout.environments.tools import tool_schemas

SOURCE = '''
import random, time
import numpy as np

made = []

class Dice:
    def __init__(self):
        made.append(self)
        self.thrown = []

    def reset(self, target, prompt, **row):
        self.target = target
        return f"{prompt[0]['content']} Reach {target}, from {random.randint(1, 1000)}."

    def throw(self, sides: int) -> str:
        """
        Throws a die.

        Args:
            sides: How many sides it has.
        """
        if sides < 1:
            raise ValueError("no such die")
        self.thrown.append(random.randint(1, sides) + int(np.random.randint(1000)))
        return f"throw {len(self.thrown)}: {self.thrown[-1]}"

    async def get_reward(self):
        return len(self.thrown) / 4

    def _hidden(self):
        raise AssertionError

class Silent:
    def reset(self, **row):
        return None

    async def wait(self) -> str:
        """Waits."""
        return "waited"

class Server(Dice):
    count = 0

    def reset(self, **row):
        Server.count += 1
        return f"game {Server.count}"

class Undescribed:
    def reset(self, **row):
        return "go"

    def go(self, where):
        return where

class Picture(Silent):
    def reset(self, **row):
        return [{"type": "image"}]

class Board(Silent):
    @property
    def board(self):
        raise KeyError("no game yet")

    def get_reward(self):
        return "good"

class Late(Silent):
    def reset(self, target=0, **row):
        if target == 1:
            time.sleep(1000)
        return str(target)

class Shown:
    def start(self, record):
        return {"number": record.extra_info["number"]}

    def step(self, state, turn):
        return state, [], True, 1.0

    def observe(self, state):
        return [{"role": "user", "content": f"You see {state['number']}."}]
'''


@pytest.fixture
def environment(tmp_path: Path) -> Callable[..., MultiTurnConfig]:
    path = user_code(tmp_path, SOURCE)
    return lambda name, **changes: multi_turn(environment=f"{path}:{name}", **changes)


def test_public_methods_are_tools(environment):
    (schema,) = tool_schemas(environment("Dice"))
    assert schema["function"]["name"] == "throw" and schema["function"]["description"] == "Throws a die."
    assert list(schema["function"]["parameters"]["properties"]) == ["sides"]
    assert not load_environment(environment("Dice")).is_async and load_environment(environment("Silent")).is_async


def test_calls_are_answered_until_a_turn_has_none(environment):
    dice = load_environment(environment("Dice", max_parallel_calls=2))
    state, messages = start(dice)
    assert len(messages) == 1 and messages[0].startswith("Play. Reach 4, from ")
    first = take(dice, ("throw", {"sides": 6}), ("throw", {"sides": "0"}), ("throw", {"sides": 6}), state=state)
    assert contents(first)[0].startswith("throw 1: ") and contents(first)[1:] == ["Error: ValueError: no such die"]
    assert (first.done, first.reward, first.counts) == (False, 0.0, (3, 0, 1, 0, 0, 0))
    unknown = take(dice, ("get_reward", {}), ("_hidden", {}), state=first.state)
    assert [text.partition(";")[0] for text in contents(unknown)] == [
        "Error: there is no tool 'get_reward'",
        "Error: there is no tool '_hidden'",
    ]
    last = take(dice, state=unknown.state)
    assert (last.done, last.reward, last.counts) == (True, 0.25, (0, 0, 0, 0, 0, 0))
    assert take(dice, state=first.state, **THE_END._asdict()).reward == 0.25


def test_objects_are_repeated_elsewhere(environment):
    here = load_environment(environment("Dice"))
    state, _ = start(here)
    answers = [take(here, ("throw", {"sides": 100}), state=state)]
    for _ in range(3):
        answers.append(take(here, ("throw", {"sides": 100}), state=answers[-1].state))
    for before, expected in zip([state, *(answer.state for answer in answers)], answers, strict=False):
        again = take(load_environment(environment("Dice")), ("throw", {"sides": 100}), state=before)
        assert again == expected
    assert start(load_environment(environment("Dice"))) == (state, json.loads(json.dumps([json.loads(state)["text"]])))
    assert start(here, replace(RECORD, uid=4))[1] != start(here)[1]
    assert start(here, replace(RECORD, uid=4, extra_info={"target": 4, "seed": 3}))[1] == start(here)[1]


def test_objects_stay_in_their_process(environment):
    here = load_environment(environment("Dice"))
    module = sys.modules[here.made.__module__]
    state = start(here)[0]
    made = len(module.made)
    for _ in range(5):
        state = take(here, ("throw", {"sides": 6}), state=state).state
    assert len(module.made) == made + 1


def test_differences_are_counted_and_named(environment, capsys):
    server = load_environment(environment("Server"))
    state, messages = start(server)
    assert messages == ["game 1"]
    answer = take(server, ("throw", {"sides": 6}), state=state)
    assert answer.counts == (1, 0, 0, 0, 1, 0)
    assert "mine.py:Server': reset answered 'game 2' when repeated, not 'game 1'" in capsys.readouterr().out
    assert take(server, ("throw", {"sides": 6}), state=answer.state).counts == (1, 0, 0, 0, 0, 0)
    changed = answer.state.replace("throw 1", "throw 9")
    assert take(server, state=changed).counts[4] == 2
    assert "throw answered 'throw 1: " in capsys.readouterr().out


def test_environment_without_reward_or_text(environment):
    silent = load_environment(environment("Silent"))
    state, messages = start(silent)
    answer = take(silent, ("wait", {}), state=state)
    assert (messages, contents(answer)) == ([], ["waited"])
    assert take(silent, state=answer.state)[2:4] == (True, 0.0) and not silent.gives_reward


@pytest.mark.parametrize(("name", "reward", "line"), refusals("rollout/refusals.txt", "classes"))
def test_class_that_cannot_be_used_is_refused(environment, refused, name: str, reward: str, line: str):
    with refused(line):
        made = load_environment(environment(name, reward=reward))
        take(made, state=start(made)[0])


def test_properties_are_not_evaluated(environment):
    assert [schema["function"]["name"] for schema in tool_schemas(environment("Board"))] == ["wait"]


@pytest.mark.parametrize(
    ("messages", "chat"),
    [
        ([("user", "b")], [("system", "s"), ("user", "a\n\nb")]),
        ([("user", "b"), ("user", "c")], [("system", "s"), ("user", "a\n\nb\n\nc")]),
        ([("assistant", "b"), ("user", "c")], [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c")]),
        ([], [("system", "s"), ("user", "a")]),
    ],
)
def test_observations_join_the_chat(messages: list[tuple[str, str]], chat: list[tuple[str, str]]):
    def dicts(pairs: list[tuple[str, str]]) -> list[dict[str, str]]:
        return [{"role": role, "content": content} for role, content in pairs]

    record = replace(RECORD, messages=dicts([("system", "s"), ("user", "a")]))
    observing = record.observing("{}", dicts(messages))
    assert observing.messages == dicts(chat) and observing.state == "{}"
    assert record.messages == dicts([("system", "s"), ("user", "a")])
    assert new_conversations([observing])[0].state == "{}"


@pytest.mark.slow
def test_prompts_of_a_file_hold_observations(environment, tmp_path: Path):
    rows = [{"prompt": "Look.", "extra_info": {"number": n}} for n in (1, 22222, 3)]
    path = jsonl(tmp_path / "a.jsonl", *rows)
    tokenizer = make_tiny_tokenizer()
    config = data_options(max_prompt_length=21, truncation="filter")
    with beginning(environment("Shown")) as begin:
        dataset = PromptDataset([path], tokenizer, config, scored=False, begin=begin)
    texts = [tokenizer.decode(record.input_ids) for record in dataset.records]
    assert texts == [f"<|user|>Look.\n\nYou see {n}.<|im_end|><|assistant|>" for n in (1, 3)]
    # The row that was too long does not change the state of the next one.
    assert [(record.uid, json.loads(record.state)) for record in dataset.records] == [
        (0, {"number": 1}),
        (1, {"number": 3}),
    ]


@pytest.mark.slow
def test_rows_reach_reset_and_slow_ones_end_the_run(environment, tmp_path: Path):
    rows = [{"prompt": "Look.", "target": target, "extra_info": {"seed": 5}} for target in (0, 2)]
    config = data_options(max_prompt_length=40)
    with beginning(environment("Late")) as begin:
        path = jsonl(tmp_path / "a.jsonl", *rows)
        records = PromptDataset([path], make_tiny_tokenizer(), config, scored=False, begin=begin).records
        assert [record.messages[0]["content"] for record in records] == ["Look.\n\n0", "Look.\n\n2"]
        assert json.loads(records[1].state)["row"]["target"] == 2 and json.loads(records[1].state)["seed"] == 5
        with pytest.raises(
            ConfigError, match="observation of .*b.jsonl, row 1: timeout; its limits are timeout_s=2 an"
        ):
            PromptDataset(
                [jsonl(tmp_path / "b.jsonl", rows[0], rows[0] | {"target": 1})],
                make_tiny_tokenizer(),
                config,
                scored=False,
                begin=begin,
            )


def test_nothing_begins_without_observe(environment):
    for options in (multi_turn(enable=False), environment("Shown", enable=False)):
        with beginning(options) as begin:
            assert begin is None


def test_documented_class_counts(tmp_path: Path):
    options = multi_turn(environment=f"{documented('class Counter', tmp_path)}:Counter")
    counter = load_environment(options)
    assert isinstance(counter, LiveEnvironment)
    state, messages = start(counter)
    answer = take(counter, ("increment", {"by": 1}), state=take(counter, ("increment", {"by": 3}), state=state).state)
    assert (messages, contents(answer)) == (["Count up to 4."], ["4"])
    assert take(counter, state=answer.state).reward == 1.0
    tokenizer = make_tiny_tokenizer()
    with pytest.raises(ConfigError, match="role 'tool'"):
        tokenizer.chat_template = "{% for m in messages if m.role != 'tool' %}{{ m.role + m.content }}{% endfor %}"
        check_conversations(options, tokenizer, "chat", {})
