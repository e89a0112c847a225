"""Environments and tools: the protocol, and steps that hang, crash or fail."""

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT, shipped_config
from verl.config.errors import ConfigError
from verl.config.rollout import MultiTurnConfig
from verl.data.prompt_record import PromptRecord
from verl.rollout.environments import pool
from verl.rollout.environments.conversations import with_tools
from verl.rollout.environments.pool import (
    Answer,
    EnvironmentPool,
    EnvironmentStep,
    load_environment,
    load_environments,
    take_step,
)
from verl.rollout.environments.tools import Call, Turn, shortened, tool_schemas
from verl.utils.json_state import from_json

RECORD = PromptRecord(0, [5], "arithmetic", "7", {}, [], False)

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
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tools") / "mine.py"
    path.write_text(TOOLS)
    return path


def options(file: Path, *tools: str, **changes: object) -> MultiTurnConfig:
    shipped = replace(shipped_config().rollout.multi_turn, num_workers=1, timeout_s=2.0, memory_limit_mb=512)
    return replace(shipped, enable=True, tools=[f"{file}:{tool}" for tool in tools], **changes)


def asking(*calls: Call, malformed: bool = False) -> EnvironmentStep:
    return EnvironmentStep(RECORD, "", Turn("", [1, 2, 3], list(calls), malformed))


def contents(answer: Answer) -> list[str]:
    return [message["content"] for message in answer.messages]


@pytest.mark.parametrize(
    ("turn", "messages", "counts"),
    [
        (asking(Call("multiply", {"a": 6, "b": 7})), ["42"], (1, 0, 0, 0, 0, 0)),
        # Functions as TRL's trainers take them, of both kinds in one turn.
        (asking(Call("multiply", {"a": 6, "b": 7}), Call("add", {"a": 6, "b": 7})), ["42", "13"], (2, 0, 0, 0, 0, 0)),
        (asking(), [], (0, 0, 0, 0, 0, 0)),
        (
            asking(malformed=True),
            ["Error: the call could not be read; write a JSON object with name and arguments"],
            (0, 1, 1, 0, 0, 0),
        ),
        (
            asking(Call("divide", {})),
            ["Error: there is no tool 'divide'; the tools are multiply, add, misbehave"],
            (1, 0, 1, 0, 0, 0),
        ),
        (
            asking(Call("multiply", "6, 7")),
            ["Error: the arguments must be a JSON object, at most 64 levels deep"],
            (1, 0, 1, 0, 0, 0),
        ),
        (asking(Call("misbehave", {"how": "?"})), ["Error: ValueError: no such way (of these)"], (1, 0, 1, 0, 0, 0)),
        # A model can provoke these, so none may end the run.
        (asking(Call("misbehave", {"how": "exit"})), ["Error: SystemExit: 3"], (1, 0, 1, 0, 0, 0)),
        (asking(Call("misbehave", {"how": "cancel"})), ["Error: CancelledError: "], (1, 0, 1, 0, 0, 0)),
        (asking(Call("misbehave", {"how": "panic"})), ["Error: Panic: in Rust"], (1, 0, 1, 0, 0, 0)),
        (asking(Call("misbehave", {"how": "interrupt"})), ["Error: KeyboardInterrupt: "], (1, 0, 1, 0, 0, 0)),
        (
            asking(Call("misbehave", {"how": "speechless"})),
            ["Error: Speechless"],
            (1, 0, 1, 0, 0, 0),
        ),
        (asking(Call("misbehave", {"how": "memory"})), ["Error: out of memory"], (1, 0, 1, 0, 0, 0)),
        (
            asking(Call("misbehave", {"how": "recurse"})),
            ["Error: RecursionError: maximum recursion depth exceeded"],
            (1, 0, 1, 0, 0, 0),
        ),
        # Some formats write numbers as they write text.
        (asking(Call("multiply", {"a": "6", "b": "\n7\n"})), ["42"], (1, 0, 0, 0, 0, 0)),
        # One of two calls could not be read.
        (
            asking(Call("multiply", {"a": 6, "b": 7}), malformed=True),
            ["42", "Error: the call could not be read; write a JSON object with name and arguments"],
            (1, 1, 1, 0, 0, 0),
        ),
        # Of three calls two are answered.
        (asking(*[Call("multiply", {"a": 2, "b": n}) for n in (1, 2, 3)]), ["2", "4"], (3, 0, 0, 0, 0, 0)),
    ],
)
def test_calls_are_answered_by_messages(
    file: Path, turn: EnvironmentStep, messages: list[str], counts: tuple[int, ...]
):
    environment = load_environment(options(file, "multiply", "add", "misbehave", max_parallel_calls=2))
    answer = asyncio.run(take_step(environment, turn))
    assert (contents(answer), answer.counts, answer.done) == (messages, counts, not messages)


def test_a_state_of_tensors_travels_as_json(file: Path):
    environment = load_environment(options(file, environment=f"{file}:Counting"))
    answer = asyncio.run(take_step(environment, asking()))
    answer = asyncio.run(take_step(environment, EnvironmentStep(RECORD, answer.state, Turn("hi", [1], [], False))))
    state = from_json(json.loads(answer.state))
    assert torch.equal(state["sum"], torch.tensor([4.0, 4.0])) and state["uid"] == 0
    assert (answer.messages, answer.done, answer.reward) == ([{"role": "user", "content": "hi"}], False, 0.25)


def test_the_model_is_told_what_get_json_schema_reads(file: Path):
    multiply, add = tool_schemas(options(file, "multiply", "add"))
    assert (multiply["function"]["name"], add["function"]["name"]) == ("multiply", "add")
    assert multiply["function"]["parameters"]["properties"]["a"] == {"type": "integer", "description": "one factor."}
    assert add["function"]["return"] == {"type": "integer", "description": "Their sum."}


@pytest.mark.parametrize(
    ("side", "expected"),
    [("left", "(truncated)...ghij"), ("right", "abcd...(truncated)"), ("middle", "ab...(truncated)...ij")],
)
def test_long_answers_are_shortened_as_in_verl(file: Path, side: str, expected: str):
    cut = options(file, "multiply", max_tool_response_length=4, tool_response_truncate_side=side)
    assert shortened("abcdefghij", cut) == expected
    assert shortened("abcd", cut) == "abcd"


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("[1, 2]", "wrong.py, line 4\\) returned list; expected \\(state, messages, done, reward\\)"),
        ("(object(), [], True, None)", "its state: .* keep JSON values and tensors"),
        ("({}, ['hello'], True, None)", "returned the message 'hello'; expected a dict with role and content"),
        ("({}, [], True, float('nan'))", "returned the reward nan; expected None or a finite number"),
        ("({}, [{'role': '', 'content': ''}], True, None)", "returned the message .*; expected a dict with role and"),
        ("({}, [], True, 'good')", "wrong.py, line 4\\) returned the reward 'good'; expected None or a finite number"),
        ("({}, 5, False, None)", "wrong.py, line 4\\) returned the messages 5; expected a list of dicts"),
        (
            "({}, [], __import__('numpy').ones(2), 0)",
            "wrong.py, line 4\\) returned done=array.*; expected true or false",
        ),
        ("1 / 0", "raised ZeroDivisionError: division by zero"),
    ],
)
def test_mistakes_of_an_environment_are_named(tmp_path: Path, returned: str, message: str):
    path = tmp_path / "wrong.py"
    path.write_text(
        f"class Env:\n    def start(self, record):\n        return {{}}\n"
        f"    def step(self, state, turn):\n        return {returned}\n"
    )
    environment = load_environment(options(path, environment=f"{path}:Env"))
    with pytest.raises(ConfigError, match=message):
        asyncio.run(take_step(environment, asking()))


def test_step_gets_the_state_of_a_checkpoint(file: Path):
    environment = load_environment(options(file, environment=f"{file}:Pairs"))
    first = asyncio.run(take_step(environment, asking()))
    second = asyncio.run(take_step(environment, EnvironmentStep(RECORD, first.state, asking().turn)))
    assert contents(first) == contents(second) == ["[1, 2]"]


def test_calls_of_one_turn_wait_together(file: Path, monkeypatch: pytest.MonkeyPatch):
    together = options(file, "wait", timeout_s=1.0, max_parallel_calls=4)
    monkeypatch.setattr(pool, "_ENVIRONMENTS", [(load_environments(together), together)])
    started = time.monotonic()
    calls = [Call("wait", {"seconds": seconds}) for seconds in (0.7, 0.7, 0.7, 60.0)]
    answer = asyncio.run(pool._guarded(asking(*calls)))
    assert contents(answer) == ["done"] * 3 + ["Error: no answer within 1 s"]
    assert answer.counts == (4, 0, 0, 1, 0, 0) and time.monotonic() - started < 2.0


def test_an_environments_tools_are_described(file: Path):
    dealing = options(file, environment=f"{file}:Dealer")
    (schema,) = with_tools({"enable_thinking": False}, dealing)["tools"]
    assert schema["function"]["name"] == "multiply"
    assert "tools" not in with_tools({}, options(file, environment=f"{file}:Counting"))


@pytest.mark.slow
def test_hanging_start_ends_the_conversation(file: Path, tmp_path: Path):
    log = tmp_path / "environment.log"
    late = options(file, environment=f"{file}:Late", timeout_s=4.0)
    with EnvironmentPool(late, log=log) as pool:
        steps = [
            EnvironmentStep(replace(RECORD, uid=1), "", asking().turn),
            EnvironmentStep(RECORD, "", Turn("hang", [1], [], False)),
        ]
        start, step, fine = (answer.result() for answer in pool.ask([*steps, asking()]))
    assert (contents(start), start.done, start.counts[3]) == (["Error: no answer within 4 s"], True, 1)
    # The state is that of start, so that the conversation goes on.
    assert (contents(step), step.done, step.state) == (["Error: no answer within 4 s"], False, "{}")
    assert contents(fine) == ["done"] and log.read_text() == "stepped\n"


@pytest.mark.slow
def test_a_step_that_is_ended_costs_one_observation(file: Path):
    steps = [asking(Call("misbehave", {"how": how})) for how in ("hang", "die", "memory")]
    steps.append(asking(Call("multiply", {"a": 6, "b": 7})))
    with EnvironmentPool(options(file, "multiply", "misbehave")) as pool:
        answers = [answer.result() for answer in pool.ask(steps)]
    texts = [contents(answer)[0] for answer in answers]
    assert texts == ["Error: no answer within 2 s", "Error: crash", "Error: out of memory", "42"]
    assert [answer.counts[2:4] for answer in answers] == [(0, 1), (1, 0), (1, 0), (0, 0)]
    assert not any(answer.done for answer in answers[:3])


@pytest.mark.slow
@pytest.mark.nightly
def test_blocking_async_tool_costs_one_observation(file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("verl.rollout.environments.pool.MARGIN_S", 1.0)
    steps = [asking(Call("misbehave", {"how": how})) for how in ("hang", "die")]
    with EnvironmentPool(options(file, "wait", "misbehave")) as pool:
        answers = pool.ask([*steps, asking(Call("wait", {"seconds": 0.1}))])
        texts = [contents(answer.result())[0] for answer in answers]
    assert texts == ["Error: no answer within 2 s", "Error: crash", "done"]


@pytest.mark.slow
def test_async_tools_wait_together(file: Path):
    with EnvironmentPool(options(file, "wait", timeout_s=5.0)) as pool:
        pool.ask([asking(Call("wait", {"seconds": 0.0}))])[0].result()
        started = time.monotonic()
        answers = pool.ask([asking(Call("wait", {"seconds": 1.0}))] * 60 + [asking(Call("wait", {"seconds": 60.0}))])
        order: list[str] = []
        answers[-1].add_done_callback(lambda _: order.append("late"))
        (quick,) = pool.ask([asking(Call("wait", {"seconds": 0.0}))])
        quick.add_done_callback(lambda _: order.append("quick"))
        texts = [contents(answer.result())[0] for answer in answers]
    assert texts == ["done"] * 60 + ["Error: no answer within 5 s"] and order == ["quick", "late"]
    # One after another they would take a minute.
    assert time.monotonic() - started < 45


def documented(name: str, folder: Path) -> Path:
    """The example of docs/conversations.md that holds ``name``, as a file."""
    text = (ROOT / "docs" / "conversations.md").read_text()
    (block,) = [part.partition("```")[0] for part in text.split("```python\n")[1:] if name in part.partition("```")[0]]
    path = folder / "example.py"
    path.write_text(block)
    return path


def test_the_documented_environment_plays(tmp_path: Path):
    path = documented("class GuessTheNumber", tmp_path)
    assert len(path.read_text().strip().splitlines()) <= 30
    environment = load_environment(options(path, environment=f"{path}:GuessTheNumber"))
    record = replace(RECORD, extra_info={"number": 7})
    state, heard = "", []
    for said in ("I guess 50", "hm", "20", "7!"):
        answer = asyncio.run(take_step(environment, EnvironmentStep(record, state, Turn(said, [1], [], False))))
        state = answer.state
        heard.append((contents(answer), answer.done, answer.reward))
    lower = (["It is lower."], False, 0.0)
    assert heard == [lower, (["Guess a number."], False, -0.1), lower, ([], True, 1.0)]


def test_the_documented_tool_is_the_embedded_tasks(tmp_path: Path):
    path = documented("def multiply", tmp_path)
    shipped = options(ROOT / "data" / "arithmetic_tools" / "calculator.py", "multiply")
    assert tool_schemas(options(path, "multiply")) == tool_schemas(shipped)


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ("None", "its tools: None; expected a list of functions, or of schemas in OpenAI's form"),
        ("property(list)", "its tools: <property object .*; expected a list of functions"),
        (
            "[{'name': 'add', 'inputSchema': {}}]",
            "its tools: {'name': 'add', .*; expected functions, or schemas in Open",
        ),
        ("[schema(parameters='none')]", "its tools: {.*'none'}}; expected functions, or schemas in OpenAI's form"),
        ("[schema(parameters={'properties': ['a']})]", "expected functions, or schemas in OpenAI's form"),
        ("[schema(), schema()]", "its tools: two have the same name; rename one"),
        ("[Callable()]", "its tools: is <.*Callable object .*>; name a function, or a method such as object.forward"),
    ],
)
def test_tools_in_another_form_are_refused(tmp_path: Path, tools: str, message: str):
    path = tmp_path / "wrong.py"
    path.write_text(
        "def schema(**rest):\n    return {'type': 'function', 'function': {'name': 'add', **rest}}\n"
        "class Callable:\n    def __call__(self): ...\n"
        f"class Env:\n    tools = {tools}\n    def start(self, record): ...\n    def step(self, state, turn): ...\n"
    )
    with pytest.raises(ConfigError, match=message):
        tool_schemas(options(path, environment=f"{path}:Env"))
