"""First observations in prompts, and environments with TRL's contract, which are repeated elsewhere."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizer import make_tiny_tokenizer

from tests.conftest import ROOT, shipped_config
from tests.kit import data_options, jsonl
from verl.config.errors import ConfigError
from verl.config.rollout import MultiTurnConfig
from verl.data.prompt_record import PromptRecord
from verl.data.prompts import PromptDataset
from verl.evaluation.benchmarks import load_benchmark
from verl.evaluation.tasks import observed_problems
from verl.rollout.environments.conversations import THE_END, check_conversations, new_conversations
from verl.rollout.environments.live import LiveEnvironment
from verl.rollout.environments.pool import (
    Answer,
    EnvironmentStep,
    beginning,
    first_observation,
    load_environment,
    take_step,
)
from verl.rollout.environments.tools import Call, Turn, tool_schemas

RECORD = PromptRecord(3, [5], "environment", None, {"target": 4}, [{"role": "user", "content": "Play."}], False)

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

class Broken:
    def start(self, record):
        return {"number": record.extra_info["number"]}

    def step(self, state, turn):
        return state, [], True, 1.0

    def observe(self, state):
        return {"none": None, "text": "see", "role": [{"content": "see"}]}.get(state["number"]) or 1 / 0

class Shown(Broken):
    def observe(self, state):
        return [{"role": "user", "content": f"You see {state['number']}."}]
'''


@pytest.fixture
def environment(tmp_path: Path) -> Callable[..., MultiTurnConfig]:
    (tmp_path / "mine.py").write_text(SOURCE)

    def options(name: str, **changes: Any) -> MultiTurnConfig:
        shipped = replace(shipped_config().rollout.multi_turn, num_workers=1, timeout_s=2.0, memory_limit_mb=512)
        return replace(shipped, **({"enable": True, "environment": f"{tmp_path / 'mine.py'}:{name}"} | changes))

    return options


def begun(environment: Any, record: PromptRecord = RECORD) -> tuple[str, list[str]]:
    state, messages = asyncio.run(first_observation(environment, record))
    return state, [message["content"] for message in messages]


def step(environment: Any, state: str, *calls: tuple[str, Any], turn: Turn | None = None) -> Answer:
    turn = turn or Turn("", [1], [Call(*call) for call in calls], False)
    return asyncio.run(take_step(environment, EnvironmentStep(RECORD, state, turn)))


def said(answer: Answer) -> list[str]:
    return [message["content"] for message in answer.messages]


def test_public_methods_are_tools(environment):
    (schema,) = tool_schemas(environment("Dice"))
    assert schema["function"]["name"] == "throw" and schema["function"]["description"] == "Throws a die."
    assert list(schema["function"]["parameters"]["properties"]) == ["sides"]
    assert not load_environment(environment("Dice")).is_async and load_environment(environment("Silent")).is_async


def test_calls_are_answered_until_a_turn_has_none(environment):
    dice = load_environment(environment("Dice", max_parallel_calls=2))
    state, messages = begun(dice)
    assert len(messages) == 1 and messages[0].startswith("Play. Reach 4, from ")
    first = step(dice, state, ("throw", {"sides": 6}), ("throw", {"sides": "0"}), ("throw", {"sides": 6}))
    assert said(first)[0].startswith("throw 1: ") and said(first)[1:] == ["Error: ValueError: no such die"]
    assert (first.done, first.reward, first.counts) == (False, 0.0, (3, 0, 1, 0, 0, 0))
    unknown = step(dice, first.state, ("get_reward", {}), ("_hidden", {}))
    assert [text.partition(";")[0] for text in said(unknown)] == [
        "Error: there is no tool 'get_reward'",
        "Error: there is no tool '_hidden'",
    ]
    last = step(dice, unknown.state)
    assert (last.done, last.reward, last.counts) == (True, 0.25, (0, 0, 0, 0, 0, 0))
    assert step(dice, first.state, turn=THE_END).reward == 0.25


def test_objects_are_repeated_elsewhere(environment):
    here = load_environment(environment("Dice"))
    state, _ = begun(here)
    answers = [step(here, state, ("throw", {"sides": 100}))]
    for _ in range(3):
        answers.append(step(here, answers[-1].state, ("throw", {"sides": 100})))
    for before, expected in zip([state, *(answer.state for answer in answers)], answers, strict=False):
        again = step(load_environment(environment("Dice")), before, ("throw", {"sides": 100}))
        assert again == expected
    assert begun(load_environment(environment("Dice"))) == (state, json.loads(json.dumps([json.loads(state)["text"]])))
    assert begun(here, replace(RECORD, uid=4))[1] != begun(here)[1]
    assert begun(here, replace(RECORD, uid=4, extra_info={"target": 4, "seed": 3}))[1] == begun(here)[1]


def test_objects_stay_in_their_process(environment):
    here = load_environment(environment("Dice"))
    module = __import__("sys").modules[here.made.__module__]
    state = begun(here)[0]
    made = len(module.made)
    for _ in range(5):
        state = step(here, state, ("throw", {"sides": 6})).state
    assert len(module.made) == made + 1


def test_differences_are_counted_and_named(environment, capsys):
    server = load_environment(environment("Server"))
    state, messages = begun(server)
    assert messages == ["game 1"]
    answer = step(server, state, ("throw", {"sides": 6}))
    assert answer.counts == (1, 0, 0, 0, 1, 0)
    assert "mine.py:Server': reset answered 'game 2' when repeated, not 'game 1'" in capsys.readouterr().out
    assert step(server, answer.state, ("throw", {"sides": 6})).counts == (1, 0, 0, 0, 0, 0)
    changed = answer.state.replace("throw 1", "throw 9")
    assert step(server, changed).counts[4] == 2
    assert "throw answered 'throw 1: " in capsys.readouterr().out


def test_environment_without_reward_or_text(environment):
    silent = load_environment(environment("Silent"))
    state, messages = begun(silent)
    answer = step(silent, state, ("wait", {}))
    assert (messages, said(answer)) == ([], ["waited"])
    assert step(silent, answer.state)[2:4] == (True, 0.0) and not silent.gives_reward


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Undescribed", "mine.py:Undescribed': go: its schema raised "),
        ("Picture", "mine.py:Picture': reset(**row) returned list; expected text or None"),
    ],
)
def test_classes_that_cannot_be_used_are_refused(environment, name: str, message: str):
    with pytest.raises(ConfigError) as error:
        begun(load_environment(environment(name)))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_properties_are_not_evaluated_and_rewards_checked(environment):
    board = load_environment(environment("Board", reward="only"))
    assert [schema["function"]["name"] for schema in tool_schemas(environment("Board"))] == ["wait"]
    line = 1 + SOURCE[: SOURCE.index('def get_reward(self):\n        return "good"')].count("\n")
    with pytest.raises(
        ConfigError, match=rf"Board': get_reward\(\) \(.*mine.py, line {line}\) returned the reward 'good'"
    ):
        step(board, begun(board)[0])
    with pytest.raises(ConfigError, match="Silent': has no get_reward.. for rollout.multi_turn.reward=only; define it"):
        load_environment(environment("Silent", reward="only"))


@pytest.mark.parametrize(
    ("number", "message"),
    [
        ("text", "Broken: observe(state) returned the messages 'see'; expected a list of dicts"),
        (
            "role",
            "Broken: observe(state) returned the message {'content': 'see'}; expected a dict with role and content",
        ),
        ("none", "Broken: observe(state) raised ZeroDivisionError: division by zero"),
    ],
)
def test_mistakes_of_observe_are_named(environment, number: str, message: str):
    with pytest.raises(ConfigError) as error:
        begun(load_environment(environment("Broken")), replace(RECORD, extra_info={"number": number}))
    assert message in str(error.value)


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


@pytest.mark.slow
def test_evaluations_begin_with_observations(environment, tmp_path: Path):
    jsonl(tmp_path / "game.jsonl", *({"prompt": [{"role": "user", "content": "Look."}], "number": n} for n in (1, 2)))
    problems = load_benchmark("game", tmp_path, scored=False, whole_rows=True)
    (found,) = observed_problems({"game": problems}, environment("Shown")).values()
    assert [problem.messages[0]["content"] for problem in found] == ["Look.\n\nYou see 1.", "Look.\n\nYou see 2."]
    assert (found[1].record(1, [5]).state, found[1].record(1, [5]).uid) == ('{"number": 2}', 1)
    assert observed_problems({"game": problems}, environment("Shown", enable=False)) == {"game": problems}


def test_nothing_begins_without_observe(environment):
    with beginning(shipped_config().rollout.multi_turn) as begin:
        assert begin is None
    with beginning(environment("Broken", enable=False)) as begin:
        assert begin is None


def test_documented_class_counts(tmp_path: Path):
    text = (ROOT / "docs" / "conversations.md").read_text()
    (source,) = [part.partition("```")[0] for part in text.split("```python\n") if "class Counter" in part]
    (tmp_path / "mine.py").write_text(source)
    path = f"{tmp_path / 'mine.py'}:Counter"
    options = replace(shipped_config().rollout.multi_turn, enable=True, environment=path)
    counter = load_environment(options)
    assert isinstance(counter, LiveEnvironment)
    state, messages = begun(counter)
    answer = step(counter, step(counter, state, ("increment", {"by": 3})).state, ("increment", {"by": 1}))
    assert (messages, said(answer)) == (["Count up to 4."], ["4"])
    assert step(counter, answer.state).reward == 1.0
    tokenizer = make_tiny_tokenizer()
    with pytest.raises(ConfigError, match="role 'tool'"):
        tokenizer.chat_template = "{% for m in messages if m.role != 'tool' %}{{ m.role + m.content }}{% endfor %}"
        check_conversations(options, tokenizer, "chat", {})
