"""Environment that runs the tools requested by the model: Python functions and veRL's tool classes."""

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from transformers.utils.chat_template_utils import get_json_schema

from verl.config.errors import ConfigError
from verl.config.rollout import MultiTurnConfig
from verl.data.prompt_rows import PromptRecord
from verl.rollout.environments.verl_tools import VerlTool, verl_tools
from verl.utils.user_code import described, load_code, user_code

FIELD = "rollout.multi_turn.tools"

DEEPEST = 64
"""Maximum nesting of a call's arguments. Python's own functions for JSON and pickling fail at a few hundred levels."""


class Call(NamedTuple):
    """Tool call in a policy turn."""

    name: str
    arguments: Any
    """Arguments parsed from the model's JSON: a mapping, or a text if the model wrote anything else."""


class Turn(NamedTuple):
    """Turn of the policy."""

    text: str
    """Text without special tokens."""
    tokens: list[int]
    calls: list[Call]
    malformed: bool
    """Whether the turn contains the start of a call that cannot be parsed."""


class FunctionTool:
    """Tool backed by a Python function with annotated arguments and a docstring, as in ``transformers`` and TRL.

    Raises:
        ConfigError: If no schema can be derived from the function.
    """

    def __init__(self, function: Callable[..., Any], where: str) -> None:
        self.function = function
        self.is_async = inspect.iscoroutinefunction(function)
        with user_code(f"{where}: its schema"):
            self.schema = get_json_schema(function)

    def begin(self, record: PromptRecord) -> None:
        """Return None, because a function has no state."""

    async def call(self, state: Any, arguments: dict[str, Any]) -> tuple[Any, str, float]:
        """Call the function and return its result as text."""
        result = self.function(**arguments)
        result = await result if inspect.isawaitable(result) else result
        return state, result if isinstance(result, str) else _text(result), 0.0


Tool = FunctionTool | VerlTool


def _text(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(value)


def load_tools(options: MultiTurnConfig) -> dict[str, Tool]:
    """Load the tools by name; raise ``ConfigError`` if loading fails or two have the same name."""
    tools: list[Tool] = [FunctionTool(load_code(path, FIELD), f"{FIELD}={path!r}") for path in options.tools]
    if options.tool_config_path is not None:
        tools += verl_tools(options.tool_config_path)
    by_name = {str(tool.schema["function"]["name"]): tool for tool in tools}
    if len(by_name) < len(tools):
        raise ConfigError(f"{FIELD}={options.tools}: two tools have the same name; rename one")
    return by_name


def tool_schemas(options: MultiTurnConfig) -> list[dict[str, Any]]:
    """Return the schemas of the tools for the model, or an empty list if the environment is custom."""
    return [tool.schema for tool in load_tools(options).values()] if options.has_tools else []


class ToolEnvironment:
    """Environment that runs up to ``max_parallel_calls`` calls per turn and ends the conversation if there are none."""

    def __init__(self, tools: Mapping[str, Tool], options: MultiTurnConfig) -> None:
        self.tools, self.options = tools, options
        self.is_async = any(tool.is_async for tool in tools.values())

    def start(self, record: PromptRecord) -> dict[str, Any]:
        """Return the initial state of each tool."""
        return {name: tool.begin(record) for name, tool in self.tools.items()}

    async def step(
        self, state: dict[str, Any], turn: Turn
    ) -> tuple[dict[str, Any], list[dict[str, Any]], bool, float | None]:
        """Return a message for each call, and an error message if there is a call that could not be parsed.

        ``async`` tools run at the same time, each within ``timeout_s``.
        """
        calls = turn.calls[: self.options.max_parallel_calls]
        answers = await asyncio.gather(*(self._answer(state, call) for call in calls))
        messages = [message for message, _ in answers]
        if turn.malformed:
            what = "Error: the call could not be read; write a JSON object with name and arguments"
            messages.append({"role": "tool", "name": "error", "content": what, "failed": True})
        return state, messages, not messages, sum(reward for _, reward in answers)

    async def _answer(self, state: dict[str, Any], call: Call) -> tuple[dict[str, Any], float]:
        name, tool = call.name, self.tools.get(call.name)
        if tool is None:
            return _failed(name, f"there is no tool {name!r}; the tools are {', '.join(self.tools)}"), 0.0
        if not isinstance(call.arguments, dict):
            return _failed(name, f"the arguments must be a JSON object, at most {DEEPEST} levels deep"), 0.0
        limit = self.options.timeout_s
        try:
            async with asyncio.timeout(limit if tool.is_async else None) as waiting:
                state[name], text, reward = await tool.call(state[name], with_types(call.arguments, tool.schema))
        except (MemoryError, GeneratorExit):
            raise
        except BaseException as error:  # whatever a tool raises is reported to the model, a panic of Rust included
            if waiting.expired():
                return _failed(name, f"no answer within {limit:g} s") | {"timed_out": True}, 0.0
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                # The step exceeded its time limit.
                raise
            return _failed(name, described(error)), 0.0
        return {"role": "tool", "name": name, "content": shortened(text, self.options)}, reward


def _failed(name: str, why: str) -> dict[str, Any]:
    return {"role": "tool", "name": name, "content": f"Error: {why}"[:500], "failed": True}


def with_types(arguments: dict[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the ``arguments`` of a call to the types in ``schema``.

    Several formats (``qwen3_coder``, ``glm45``) write arguments without quotes, so text is parsed as JSON if the schema
    requires a type other than string.
    """
    described = (schema["function"].get("parameters") or {}).get("properties") or {}
    return {name: _with_type(value, described.get(name)) for name, value in arguments.items()}


def _with_type(value: Any, described: Any) -> Any:
    kind = described.get("type") if isinstance(described, Mapping) else None
    if not isinstance(value, str) or kind is None or "string" in (kind if isinstance(kind, list) else [kind]):
        return value
    try:
        return json.loads(value.lower() if kind == "boolean" else value)
    except (ValueError, RecursionError):
        return value


def shortened(text: str, options: MultiTurnConfig) -> str:
    """Truncate ``text`` to ``max_tool_response_length`` on ``tool_response_truncate_side``."""
    longest, side = options.max_tool_response_length, options.tool_response_truncate_side
    if len(text) <= longest:
        return text
    if side == "left":
        return text[:longest] + "...(truncated)"
    if side == "right":
        return "(truncated)..." + text[-longest:]
    half = longest // 2
    return text[:half] + "...(truncated)..." + text[len(text) - half :]


def read_calls(parsed: Sequence[Any]) -> list[tuple[str, Any]]:
    """Return the name and arguments of each call found by one of vLLM's tool parsers."""
    return [(str(call.function.name), read_arguments(call.function.arguments)) for call in parsed]


def read_arguments(written: Any) -> Any:
    """Return arguments as a mapping if they are one in JSON, or JSON in a JSON text as OpenAI's interface sends it.

    Other arguments, and those that nest more than ``DEEPEST`` levels deep, are returned as text.
    """
    value = written
    for _ in range(2):
        if isinstance(value, str):
            with suppress(ValueError, RecursionError):
                value = json.loads(value)
    if isinstance(value, dict) and not _nests(value, DEEPEST):
        return value
    return written if isinstance(written, str) else _text(written) if not _nests(written, DEEPEST) else "(too deep)"


def _nests(value: Any, levels: int) -> bool:
    """Return whether JSON values nest more than this many levels deep."""
    layer = [value]
    for _ in range(levels):
        layer = [
            part
            for each in layer
            for part in (each.values() if isinstance(each, dict) else each)
            if isinstance(part, dict | list)
        ]
        if not layer:
            return False
    return True
