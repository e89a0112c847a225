"""Environments and tools: the protocol, and steps that hang, crash or fail."""

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.kit import ROOT, user_code
from tests.rollout.kit import RECORD, contents, documented, multi_turn, step_of, take
from tests.tables import refusals
from verl.config.rollout import MultiTurnConfig
from verl.rollout.environments import pool
from verl.rollout.environments.conversations import with_tools
from verl.rollout.environments.pool import EnvironmentPool, first_observation, load_environment, load_environments
from verl.rollout.environments.tools import shortened, tool_schemas
from verl.utils.json_state import from_json

TOOLS = '''
import asyncio, os, time

class Panic(BaseException):
    pass

class Speechless(Exception):
    def __str__(self):
        raise KeyError("text")

def multiply(a: int, b: int) -> int:
    """
    Multiplies.

    Args:
        a: one factor.
        b: the other.
    """
    return a * b

async def add(a: int, b: int) -> int:
    """
    Adds, and waits for others meanwhile.

    Args:
        a: one summand.
        b: the other.

    Returns:
        Their sum.
    """
    await asyncio.sleep(0)
    return a + b

def misbehave(how: str) -> str:
    """
    Does not return.

    Args:
        how: in which way.
    """
    if how == "hang":
        time.sleep(1000)
    if how == "die":
        os._exit(3)
    if how == "memory":
        return "x" * (1 << 40)
    if how == "exit":
        raise SystemExit(3)
    if how == "cancel":
        raise asyncio.CancelledError
    if how == "recurse":
        return misbehave(how)
    if how == "panic":
        raise Panic("in Rust")
    if how == "interrupt":
        raise KeyboardInterrupt
    if how == "speechless":
        raise Speechless
    raise ValueError("no such way (of these)")

async def wait(seconds: float) -> str:
    """
    Waits.

    Args:
        seconds: how long.
    """
    await asyncio.sleep(seconds)
    return "done"

class Pairs:
    def start(self, record):
        return {"pair": (1, 2)}

    def step(self, state, turn):
        return state, [{"role": "user", "content": str(state["pair"])}], False, None

class Late:
    def start(self, record):
        if record.uid == 1:
            time.sleep(1000)
        return {}

    def step(self, state, turn):
        if turn.text == "hang":
            time.sleep(1000)
        print("stepped")
        return state, [{"role": "user", "content": "done"}], False, None

class Dealer:
    tools = [multiply]

    def start(self, record):
        return {}

    def step(self, state, turn):
        return state, [{"role": "user", "content": repr(turn.calls)}], False, None

class Counting:
    def start(self, record):
        return {"sum": __import__("torch").zeros(2), "uid": record.uid}

    def step(self, state, turn):
        total = state["sum"] + len(turn.tokens)
        return {**state, "sum": total}, [{"role": "user", "content": turn.text}], False, 0.25
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    return user_code(tmp_path_factory.mktemp("tools"), TOOLS)


def options(file: str, *tools: str, **changes: object) -> MultiTurnConfig:
    return multi_turn(tools=[f"{file}:{tool}" for tool in tools], **changes)


MULTIPLY = ("multiply", {"a": 6, "b": 7})
UNREAD = "Error: the call could not be read; write a JSON object with name and arguments"


@pytest.mark.parametrize(
    ("calls", "malformed", "messages", "counts"),
    [
        ([MULTIPLY], False, ["42"], (1, 0, 0, 0, 0, 0)),
        # Functions as TRL's trainers take them, of both kinds in one turn.
        ([MULTIPLY, ("add", {"a": 6, "b": 7})], False, ["42", "13"], (2, 0, 0, 0, 0, 0)),
        ([], False, [], (0, 0, 0, 0, 0, 0)),
        ([], True, [UNREAD], (0, 1, 1, 0, 0, 0)),
        # One of two calls could not be read; of three calls two are answered.
        ([MULTIPLY], True, ["42", UNREAD], (1, 1, 1, 0, 0, 0)),
        ([("multiply", {"a": 2, "b": n}) for n in (1, 2, 3)], False, ["2", "4"], (3, 0, 0, 0, 0, 0)),
        # Some formats write numbers as they write text.
        ([("multiply", {"a": "6", "b": "\n7\n"})], False, ["42"], (1, 0, 0, 0, 0, 0)),
    ],
)
def test_calls_are_answered_by_messages(file: str, calls: list, malformed: bool, messages: list, counts: tuple):
    environment = load_environment(options(file, "multiply", "add", max_parallel_calls=2))
    answer = take(environment, *calls, malformed=malformed)
    assert (contents(answer), answer.counts, answer.done) == (messages, counts, not messages)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("divide", {}, "there is no tool 'divide'; the tools are multiply, misbehave"),
        ("multiply", "6, 7", "the arguments must be a JSON object, at most 64 levels deep"),
        ("misbehave", {"how": "?"}, "ValueError: no such way (of these)"),
        # A model can provoke these, so none may end the run.
        ("misbehave", {"how": "exit"}, "SystemExit: 3"),
        ("misbehave", {"how": "cancel"}, "CancelledError: "),
        ("misbehave", {"how": "panic"}, "Panic: in Rust"),
        ("misbehave", {"how": "interrupt"}, "KeyboardInterrupt: "),
        ("misbehave", {"how": "speechless"}, "Speechless"),
        ("misbehave", {"how": "memory"}, "out of memory"),
        ("misbehave", {"how": "recurse"}, "RecursionError: maximum recursion depth exceeded"),
    ],
)
def test_failed_call_is_answered_by_its_error(file: str, name: str, arguments: object, message: str):
    answer = take(load_environment(options(file, "multiply", "misbehave")), (name, arguments))
    assert (contents(answer), answer.counts, answer.done) == ([f"Error: {message}"], (1, 0, 1, 0, 0, 0), False)


def test_a_state_of_tensors_travels_as_json(file: str):
    environment = load_environment(options(file, environment=f"{file}:Counting"))
    answer = take(environment, tokens=[1, 2, 3])
    answer = take(environment, state=answer.state, text="hi")
    state = from_json(json.loads(answer.state))
    assert torch.equal(state["sum"], torch.tensor([4.0, 4.0])) and state["uid"] == 3
    assert (answer.messages, answer.done, answer.reward) == ([{"role": "user", "content": "hi"}], False, 0.25)


def test_the_model_is_told_what_get_json_schema_reads(file: str):
    multiply, add = tool_schemas(options(file, "multiply", "add"))
    assert (multiply["function"]["name"], add["function"]["name"]) == ("multiply", "add")
    assert multiply["function"]["parameters"]["properties"]["a"] == {"type": "integer", "description": "one factor."}
    assert add["function"]["return"] == {"type": "integer", "description": "Their sum."}


@pytest.mark.parametrize(
    ("side", "expected"),
    [("left", "(truncated)...ghij"), ("right", "abcd...(truncated)"), ("middle", "ab...(truncated)...ij")],
)
def test_long_answers_are_shortened_as_in_verl(file: str, side: str, expected: str):
    cut = options(file, "multiply", max_tool_response_length=4, tool_response_truncate_side=side)
    assert shortened("abcdefghij", cut) == expected
    assert shortened("abcd", cut) == "abcd"


ENVIRONMENT = """
def schema(**rest):
    return {"type": "function", "function": {"name": "add", **rest}}

class Callable:
    def __call__(self): ...

class Env:
    tools = []
    def start(self, record): return {}
    def observe(self, state): return []
    def step(self, state, turn): return {}, [], True, None
"""


@pytest.mark.parametrize(("member", "value", "line"), refusals("rollout/refusals.txt", "environments"))
def test_mistake_of_an_environment_is_named(tmp_path: Path, refused, member: str, value: str, line: str):
    source = (
        f"    tools = {value}" if member == "tools" else f"    def {member}(self, state, turn=None): return {value}"
    )
    made = multi_turn(environment=f"{user_code(tmp_path, ENVIRONMENT + source)}:Env")
    with refused(line):
        tool_schemas(made)
        environment = load_environment(made)
        asyncio.run(first_observation(environment, RECORD))
        take(environment)


def test_step_gets_the_state_of_a_checkpoint(file: str):
    environment = load_environment(options(file, environment=f"{file}:Pairs"))
    first = take(environment)
    assert contents(first) == contents(take(environment, state=first.state)) == ["[1, 2]"]


def test_calls_of_one_turn_wait_together(file: str, monkeypatch: pytest.MonkeyPatch):
    together = options(file, "wait", timeout_s=1.0, max_parallel_calls=4)
    monkeypatch.setattr(pool, "_ENVIRONMENTS", [(load_environments(together), together)])
    started = time.monotonic()
    calls = [("wait", {"seconds": seconds}) for seconds in (0.7, 0.7, 0.7, 60.0)]
    answer = asyncio.run(pool._guarded(step_of(*calls)))
    assert contents(answer) == ["done"] * 3 + ["Error: no answer within 1 s"]
    assert answer.counts == (4, 0, 0, 1, 0, 0) and time.monotonic() - started < 2.0


def test_an_environments_tools_are_described(file: str):
    dealing = options(file, environment=f"{file}:Dealer")
    (schema,) = with_tools({"enable_thinking": False}, dealing)["tools"]
    assert schema["function"]["name"] == "multiply"
    assert "tools" not in with_tools({}, options(file, environment=f"{file}:Counting"))


@pytest.mark.slow
def test_hanging_start_ends_the_conversation(file: str, tmp_path: Path):
    log = tmp_path / "environment.log"
    late = options(file, environment=f"{file}:Late", timeout_s=4.0)
    with EnvironmentPool(late, log=log) as pool:
        steps = [step_of(record=replace(RECORD, uid=1)), step_of(text="hang"), step_of()]
        start, step, fine = (answer.result() for answer in pool.ask(steps))
    assert (contents(start), start.done, start.counts[3]) == (["Error: no answer within 4 s"], True, 1)
    # The state is that of start, so that the conversation goes on.
    assert (contents(step), step.done, step.state) == (["Error: no answer within 4 s"], False, "{}")
    assert contents(fine) == ["done"] and log.read_text() == "stepped\n"


@pytest.mark.slow
def test_a_step_that_is_ended_costs_one_observation(file: str):
    steps = [step_of(("misbehave", {"how": how})) for how in ("hang", "die", "memory")]
    steps.append(step_of(("multiply", {"a": 6, "b": 7})))
    with EnvironmentPool(options(file, "multiply", "misbehave")) as pool:
        answers = [answer.result() for answer in pool.ask(steps)]
    texts = [contents(answer)[0] for answer in answers]
    assert texts == ["Error: no answer within 2 s", "Error: crash", "Error: out of memory", "42"]
    assert [answer.counts[2:4] for answer in answers] == [(0, 1), (1, 0), (1, 0), (0, 0)]
    assert not any(answer.done for answer in answers[:3])


@pytest.mark.slow
@pytest.mark.nightly
def test_blocking_async_tool_costs_one_observation(file: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("verl.rollout.environments.pool.MARGIN_S", 1.0)
    steps = [step_of(("misbehave", {"how": how})) for how in ("hang", "die")]
    with EnvironmentPool(options(file, "wait", "misbehave")) as pool:
        answers = pool.ask([*steps, step_of(("wait", {"seconds": 0.1}))])
        texts = [contents(answer.result())[0] for answer in answers]
    assert texts == ["Error: no answer within 2 s", "Error: crash", "done"]


@pytest.mark.slow
def test_async_tools_wait_together(file: str):
    with EnvironmentPool(options(file, "wait", timeout_s=5.0)) as pool:
        pool.ask([step_of(("wait", {"seconds": 0.0}))])[0].result()
        started = time.monotonic()
        answers = pool.ask([step_of(("wait", {"seconds": 1.0}))] * 60 + [step_of(("wait", {"seconds": 60.0}))])
        order: list[str] = []
        answers[-1].add_done_callback(lambda _: order.append("late"))
        (quick,) = pool.ask([step_of(("wait", {"seconds": 0.0}))])
        quick.add_done_callback(lambda _: order.append("quick"))
        texts = [contents(answer.result())[0] for answer in answers]
    assert texts == ["done"] * 60 + ["Error: no answer within 5 s"] and order == ["quick", "late"]
    # One after another they would take a minute.
    assert time.monotonic() - started < 45


def test_the_documented_environment_plays(tmp_path: Path):
    path = documented("class GuessTheNumber", tmp_path)
    assert len(Path(path).read_text().strip().splitlines()) <= 30
    environment = load_environment(options(path, environment=f"{path}:GuessTheNumber"))
    record = replace(RECORD, extra_info={"number": 7})
    state, heard = "", []
    for text in ("I guess 50", "hm", "20", "7!"):
        answer = take(environment, state=state, record=record, text=text)
        state = answer.state
        heard.append((contents(answer), answer.done, answer.reward))
    lower = (["It is lower."], False, 0.0)
    assert heard == [lower, (["Guess a number."], False, -0.1), lower, ([], True, 1.0)]


def test_the_documented_tool_is_the_embedded_tasks(tmp_path: Path):
    path = documented("def multiply", tmp_path)
    shipped = options(f"{ROOT}/data/arithmetic_tools/calculator.py", "multiply")
    assert tool_schemas(options(path, "multiply")) == tool_schemas(shipped)
