"""Several environments in one run, chosen by a column, and reward functions that read their objects."""

import json
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_tokenizer import make_tiny_tokenizer

from tests.kit import data_options, jsonl, user_code
from tests.rollout.kit import RECORD, multi_turn, step_of, take, turn
from tests.tables import refusals
from verl.batch import POLICY
from verl.config.rollout import MultiTurnConfig
from verl.data.prompt_record import PromptRecord
from verl.data.prompts import PromptDataset
from verl.evaluation.benchmarks import load_benchmark
from verl.evaluation.tasks import observed_problems
from verl.rollout.environments.conversations import (
    THE_END,
    Conversations,
    ConversationSetup,
    check_conversations,
    new_conversations,
    with_tools,
)
from verl.rollout.environments.pool import EnvironmentPool, EnvironmentStep, beginning, load_environment
from verl.rollout.environments.tools import Turn
from verl.rollout.partial import PartialResponse, to_batch

SOURCE = '''
import random

class Counter:
    def reset(self, target, **row):
        assert "environment" not in row
        self.count, self.target = 0, target
        return f"Count up to {target}."

    def add(self, by: int) -> int:
        """
        Adds to the count.

        Args:
            by: What to add.
        """
        self.count += by
        return self.count

class Scored(Counter):
    def get_reward(self):
        return self.count / 10

class Guess:
    tools = []

    def start(self, record):
        return record.extra_info["number"]

    def step(self, state, turn):
        return state, [], True, float(turn.text == str(state))

seen = {}

def by_chance(environments, environment):
    assert environment == ["count"]
    return [random.random()]

def reached(environments, **kwargs):
    seen.update(kwargs)
    return [float(environments[0].count == environments[0].target)]

async def near(completions, environments, target):
    return [abs(environments[0].count - target[0])]

def silent(environments):
    return [None]

def twice(environments):
    return [1.0, 2.0]

def bare(environments):
    return 1.0

def infinite(environments):
    return [float("inf")]

def blind(completions):
    return [1.0]

def hinted(environments, hint):
    return [1.0]
'''


@pytest.fixture
def options(tmp_path: Path) -> Callable[..., MultiTurnConfig]:
    file = user_code(tmp_path, SOURCE)

    def made(environment: str | dict[str, str], *functions: str, **changes: Any) -> MultiTurnConfig:
        def path(name: str) -> str:
            weight, _, name = name.rpartition("*")
            return f"{weight}{weight and '*'}{file}:{name}"

        named = {n: path(c) for n, c in environment.items()} if isinstance(environment, dict) else path(environment)
        return multi_turn(environment=named, reward_functions=[path(each) for each in functions], **changes)

    return made


GAMES = {"count": "Scored", "guess": "Guess"}


def played(environment: Any, record: PromptRecord, *turns: Turn) -> float:
    """Play the turns and return the sum of rewards."""
    state, total = "", 0.0
    for each in turns:
        answer = take(environment, state=state, record=record, **each._asdict())
        state, total = answer.state, total + answer.reward
    return total


def adds(by: int) -> Turn:
    return turn(("add", {"by": by}), text=f"add {by}")


LAST = turn(text="done")


@pytest.mark.slow
def test_each_record_chooses_its_environment(options, tmp_path: Path):
    rows = [
        {"prompt": "Go.", "environment": "count", "target": 4},
        {"prompt": "Guess.", "environment": "guess", "number": 7},
    ]
    chosen, tokenizer = options(GAMES), make_tiny_tokenizer()
    tokenizer.chat_template = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}" + tokenizer.chat_template
    with beginning(chosen) as begin:
        dataset = PromptDataset(
            [jsonl(tmp_path / "a.jsonl", *rows)],
            tokenizer,
            data_options(max_prompt_length=99),
            scored=False,
            begin=begin,
        )
    count, guess = dataset.records
    assert [record.messages[-1]["content"] for record in (count, guess)] == ["Go.\n\nCount up to 4.", "Guess."]
    texts = [tokenizer.decode(record.input_ids) for record in (count, guess)]
    assert [text.startswith("add<|user|>") for text in texts] == [True, False]
    with EnvironmentPool(chosen) as pool:
        assert (pool.settles(count), pool.settles(guess)) == (True, False)
        steps = [EnvironmentStep(count, count.state, adds(3)), step_of(record=guess, state=guess.state, text="7")]
        first, won = [future.result() for future in pool.ask(steps)]
        (last,) = pool.ask([EnvironmentStep(count, first.state, LAST)])
        assert (first.messages[0]["content"], won.reward, last.result().reward) == ("3", 1.0, 0.3)
        setup = ConversationSetup(chosen, 9, 9, tokenizer, {}, [], pool)
        assert ([*setup.tools_of(count)], [*setup.tools_of(guess)]) == (["add"], [])


@pytest.mark.slow
def test_problems_choose_their_environment(options, tmp_path: Path):
    rows = [{"environment": "count", "target": 4}, {"environment": "guess", "number": 7}]
    jsonl(tmp_path / "game.jsonl", *({"prompt": [{"role": "user", "content": "Go."}]} | row for row in rows))
    problems = load_benchmark("game", tmp_path, scored=False, whole_rows=True)
    (found,) = observed_problems({"game": problems}, options(GAMES)).values()
    assert [problem.record(0).messages[0]["content"] for problem in found] == ["Go.\n\nCount up to 4.", "Go."]
    first = found[0].record(1, [5])
    assert (json.loads(first.state)["row"]["target"], first.uid) == (4, 1)
    assert observed_problems({"game": problems}, options(GAMES, enable=False)) == {"game": problems}


def test_unknown_environments_name_the_record(options, refused):
    pool = EnvironmentPool(options(GAMES))
    fix = "must be one of count, guess, the names in rollout.multi_turn.environment"
    for info in ({"environment": "chess"}, {}, {"environment": ["count"]}):
        with refused(f"a.jsonl, row 5: environment={info.get('environment')!r}: {fix}"):
            pool.begin([replace(RECORD, extra_info=info)], ["a.jsonl, row 5"])


def test_each_environment_has_its_tools(options, refused):
    chosen = options(GAMES)
    assert with_tools({"a": 1}, chosen) == {"a": 1} == with_tools({"a": 1}, chosen, "guess")
    assert [tool["function"]["name"] for tool in with_tools({}, chosen, "count")["tools"]] == ["add"]
    check_conversations(chosen, make_tiny_tokenizer(), "chat", {})
    with refused("rollout.multi_turn.environment...no function or class 'Missing'"):
        load_environment(options({"a": "Guess", "b": "Missing"}), "b")


def test_environments_without_tools_get_no_calls(options):
    steps = list[EnvironmentStep]()

    def ask(new: list[EnvironmentStep]) -> list[Future]:
        steps.extend(new)
        return [Future() for _ in new]

    pool = SimpleNamespace(role="tool", settles=lambda record: False, ask=ask)
    setup = ConversationSetup(options(GAMES), 9, 9, make_tiny_tokenizer(), {}, [], pool)
    conversations = new_conversations([replace(RECORD, extra_info={"environment": name}) for name in GAMES])
    part = to_batch([PartialResponse([5], [6], [POLICY], [0.0])] * 2).fill(request=torch.arange(2))
    calls = {"calls": [("add", {"by": 3})], "malformed": True, "prefilled": 0}
    Conversations(setup, conversations).take(part.fill(truncated=torch.zeros(2).bool(), calls=[calls] * 2))
    assert [(len(step.turn.calls), step.turn.malformed) for step in steps] == [(1, True), (0, False)]


def test_functions_score_the_object(options):
    environment = load_environment(options("Scored", "reached", "0.5*near", "silent"))
    assert played(environment, RECORD, adds(3), adds(1), LAST) == 0.4 + 1.0
    assert played(environment, RECORD, adds(3), LAST) == 0.3 + 0.5 * 1
    # Cut off: the last turn is read, but its calls are not.
    assert played(environment, RECORD, adds(3), turn(text="add", ends=True)) == 0.3 + 0.5 * 1
    seen = load_environment(options("Scored")).made.reset.__globals__["seen"]
    assert seen["prompts"] == [[{"role": "user", "content": "Play.\n\nCount up to 4."}]] and seen["target"] == [4]
    assert seen["completions"] == [
        [
            {
                "role": "assistant",
                "content": "add 3",
                "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"by": 3}}}],
            },
            {"role": "tool", "name": "add", "content": "3"},
            {"role": "assistant", "content": "add"},
        ]
    ]
    assert played(environment, RECORD, adds(4), THE_END) == 0.4 + 1.0
    assert len(seen["completions"][0]) == 2


def test_functions_get_the_column_and_the_same_chance(options):
    record = replace(RECORD, extra_info={"target": 4, "environment": "count"})
    environments = [load_environment(options(GAMES, "by_chance"), "count") for _ in range(2)]
    assert played(environments[0], record, LAST) == played(environments[1], record, LAST) > 0


def test_functions_are_called_with_a_repeated_object(options):
    made = options("Counter", "reached", reward="only")
    answer = take(load_environment(made), ("add", {"by": 4}))
    again = take(load_environment(made), state=answer.state)
    assert (again.reward, again.done) == (1.0, True) and len(json.loads(again.state)["said"]) == 3


@pytest.mark.parametrize(("environment", "function", "line"), refusals("rollout/refusals.txt", "reward functions"))
def test_unfit_reward_function_is_refused(options, refused, environment: str, function: str, line: str):
    with refused(line):
        played(load_environment(options(environment, function)), RECORD, LAST)


def test_reward_function_without_its_column_is_refused(options, refused):
    pool = EnvironmentPool(options("Counter", "hinted"))
    with refused(
        "a.jsonl, row 5: rollout.multi_turn.reward_functions: ...hinted needs hint, but the record has targ..."
    ):
        pool.begin([RECORD], ["a.jsonl, row 5"])
