"""Environment that runs the tools requested by the model: Python functions and veRL's tool classes."""

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property
from typing import Any, NamedTuple

from verl.config.errors import ConfigError
from verl.config.rollout import MultiTurnConfig
from verl.data.prompt_record import PromptRecord
from verl.rollout.environments.verl_tools import (
    FUNCTION_FIELD,
    FUNCTION_TOOL,
    Fields,
    VerlTool,
    agent_data,
    function_tools,
    verl_tools,
)
from verl.utils.user_code import described, load_code, user_code

FIELD = "rollout.multi_turn.tools"
ENVIRONMENT_FIELD = "rollout.multi_turn.environment"

MAX_NAME_CHARS = 64
"""Maximum length of a tool's name in a message, as in OpenAI's API."""


DEEPEST = 64
"""Maximum nesting depth of a call's arguments. Python's JSON and pickle functions fail at a few hundred levels."""


class Call(NamedTuple):
    """Tool call in a policy turn."""

    name: str
    arguments: Any
    """Arguments as a mapping, or as text if the model did not write a JSON object."""


class Turn(NamedTuple):
    """Turn of the policy."""

    text: str
    """Text without special tokens."""
    tokens: list[int]
    calls: list[Call]
    malformed: bool
    """Whether the turn contains the start of a call that cannot be parsed."""
    ends: bool = False
    """Whether the conversation is already over and only its reward has to be computed."""


class FunctionTool:
    """Tool backed by a Python function with annotated arguments and a docstring, as in ``transformers`` and TRL.

    Raises:
        ConfigError: If no schema can be derived from the function.
    """

    def __init__(self, function: Callable[..., Any], where: str) -> None:
        self.function = function
        self.is_async = inspect.iscoroutinefunction(function)
        if not inspect.isroutine(function):
            raise ConfigError(f"{where}: is {function!r:.80}; name a function, or a method such as object.forward")
        name, schema = getattr(function, FUNCTION_TOOL, (None, None))
        if not schema:
            # Imported here, because it takes a second, and most processes of environments do not need it.
            from transformers.utils.chat_template_utils import get_json_schema

            with user_code(f"{where}: its schema"):
                schema = dict(get_json_schema(function))
        self.schema: dict[str, Any] = checked_schema(schema, where)
        if name is not None:
            self.schema = self.schema | {"function": self.schema["function"] | {"name": name}}

    async def call(self, arguments: dict[str, Any], agent_data: Any) -> str:
        """Call the function and return its result as text."""
        result = await awaited(self.function(**arguments))
        if hasattr(self.function, FUNCTION_TOOL) and isinstance(result, tuple):
            result = result[0]  # the others are veRL's reward and metrics
        return text_of(result)


Tool = FunctionTool | VerlTool


def text_of(value: Any) -> str:
    """Convert a tool's result to text. Strings and veRL's text responses are unchanged. Other values become JSON."""
    if isinstance(value, Fields):
        value = value.text or ""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(value)


def load_tools(options: MultiTurnConfig) -> dict[str, Tool]:
    """Load the tools by name. Raise ``ConfigError`` if loading fails or two tools have the same name."""
    tools: list[Tool] = [FunctionTool(load_code(path, FIELD), f"{FIELD}={path!r}") for path in options.tools]
    if options.tool_config_path is not None:
        tools += verl_tools(options.tool_config_path)
        for tool in tools:
            checked_schema(tool.schema, f"rollout.multi_turn.tool_config_path={options.tool_config_path!r}")
    if options.function_tool_path is not None:
        where = f"{FUNCTION_FIELD}={options.function_tool_path!r}"
        tools += [FunctionTool(function, where) for function in function_tools(options.function_tool_path)]
    by_name = {str(tool.schema["function"]["name"]): tool for tool in tools}
    if len(by_name) < len(tools):
        raise ConfigError(f"{FIELD}={options.tools}: two tools have the same name; rename one")
    return by_name


def environment_name(columns: Mapping[str, Any], options: MultiTurnConfig) -> str:
    """Return the name of a record's environment, given its ``extra_info``. The name of a run's only one is empty."""
    return str(columns["environment"]) if options.enable and isinstance(options.environment, dict) else ""


def environment_option(options: MultiTurnConfig, name: str) -> str:
    """Return the option that names an environment, with its value, for messages."""
    return f"{ENVIRONMENT_FIELD}{name and '.'}{name}={options.environments[name]!r}"


def tool_schemas(options: MultiTurnConfig, name: str = "") -> list[dict[str, Any]]:
    """Return the schemas of the tools in the prompt. Custom environments list tools in their ``tools`` attribute.

    Args:
        name: Name of the environment, if the run has several.

    Raises:
        ConfigError: If the tools or the environment cannot be loaded, or an entry is neither a function nor a schema.
    """
    if options.environment is None:
        return [tool.schema for tool in load_tools(options).values()] if options.enable else []
    where = f"{environment_option(options, name)}: its tools"
    made = load_code(options.environments[name], ENVIRONMENT_FIELD)
    if is_live(made):
        with user_code(where):
            return [tool.schema for tool in methods_as_tools(made(), where).values()]
    tools = getattr(made, "tools", ())
    if not isinstance(tools, list | tuple):
        raise ConfigError(f"{where}: {tools!r:.80}; expected a list of functions, or of schemas in OpenAI's form")
    schemas = [FunctionTool(t, where).schema if callable(t) else checked_schema(t, where) for t in tools]
    if len({schema["function"]["name"] for schema in schemas}) < len(schemas):
        raise ConfigError(f"{where}: two have the same name; rename one")
    return schemas


def checked_schema(schema: Any, where: str) -> dict[str, Any]:
    """Return a tool's schema, or raise ``ConfigError`` if it is not in OpenAI's form."""
    if isinstance(schema, dict) and isinstance(function := schema.get("function"), dict):
        parameters = function.get("parameters") or {}
        if (
            isinstance(function.get("name"), str)
            and isinstance(parameters, dict)
            and isinstance(parameters.get("properties") or {}, dict)
        ):
            return schema
    raise ConfigError(f"{where}: {schema!r:.200}; expected functions, or schemas in OpenAI's form")


def is_live(made: Any) -> bool:
    """Return whether ``made`` is a class with TRL's interface: a ``reset`` method, and public methods as tools."""
    return isinstance(made, type) and callable(getattr(made, "reset", None)) and not hasattr(made, "start")


def methods_as_tools(live: Any, where: str) -> dict[str, Tool]:
    """Return the public methods of an object with TRL's interface as tools, keyed by name.

    Raises:
        ConfigError: If a method has no annotations or no docstring.
    """
    # Properties are not evaluated, as many fail before the first reset.
    names = [name for name, raw in inspect.getmembers_static(live) if not isinstance(raw, property | cached_property)]
    reserved = ("reset", "get_reward")
    methods = {name: getattr(live, name) for name in names if not name.startswith("_") and name not in reserved}
    return {name: FunctionTool(m, f"{where}: {name}") for name, m in methods.items() if inspect.ismethod(m)}


async def awaited(value: Any) -> Any:
    """Return ``value``, or its result if it is awaitable."""
    return await value if inspect.isawaitable(value) else value


class ToolEnvironment:
    """Environment that runs up to ``max_parallel_calls`` calls per turn. A turn without calls ends the conversation."""

    def __init__(self, tools: Mapping[str, Tool], options: MultiTurnConfig) -> None:
        self.tools, self.options = tools, options
        self.is_async = any(tool.is_async for tool in tools.values())
        self.is_verl = any(isinstance(tool, VerlTool) for tool in tools.values())

    def start(self, record: PromptRecord) -> dict[str, Any]:
        """Return an initial state with an empty history, which is used only by veRL's tools."""
        return {"messages": [], "turns": 0, "extra_fields": {}}

    async def step(
        self, state: dict[str, Any], turn: Turn, record: PromptRecord
    ) -> tuple[dict[str, Any], list[dict[str, Any]], bool, float | None]:
        """Return a message for each call, plus an error message if a call could not be parsed.

        ``async`` tools run concurrently, each within ``timeout_s``.
        """
        state = self.start(record) | state  # checkpoints of earlier versions have other entries
        calls = turn.calls[: self.options.max_parallel_calls]
        said = [*state["messages"], {"role": "assistant", "content": turn.text}] if self.is_verl else []
        data = agent_data(record, said, state["turns"] + 1, state["extra_fields"], turn.tokens)
        messages = list(await asyncio.gather(*(self.answer(call, data) for call in calls)))
        if turn.malformed:
            messages.append(unreadable_call())
        said += [{"role": "tool", "content": message["content"]} for message in messages] if self.is_verl else []
        state = {"messages": said, "turns": state["turns"] + 1, "extra_fields": data.extra_fields}
        return state, messages, not messages, None

    async def answer(self, call: Call, data: Any) -> dict[str, Any]:
        """Run one call and return its message. The time limit applies to each ``async`` call separately."""
        name, tool = call.name[:MAX_NAME_CHARS], self.tools.get(call.name)
        if tool is None:
            return _failed(name, f"there is no tool {name!r}; the tools are {', '.join(self.tools)}")
        if not isinstance(call.arguments, dict):
            return _failed(name, f"the arguments must be a JSON object, at most {DEEPEST} levels deep")
        limit = asyncio.timeout(self.options.timeout_s if self.is_async else None)
        try:
            async with limit:
                text = await tool.call(with_types(call.arguments, tool.schema), data)
        except GeneratorExit:
            raise
        except BaseException as error:  # errors of tools, which may raise anything, are reported to the model
            task = asyncio.current_task()
            if limit.expired():
                return _failed(name, f"no answer within {self.options.timeout_s:g} s") | {"timed_out": True}
            if task is not None and task.cancelling():
                raise
            if isinstance(error, MemoryError):
                return _failed(name, "out of memory")
            return _failed(name, described(error))
        return {"role": "tool", "name": name, "content": shortened(text, self.options)}


def unreadable_call() -> dict[str, Any]:
    """Return the message for a call that cannot be parsed."""
    return _failed("error", "the call could not be read; write a JSON object with name and arguments")


def _failed(name: str, why: str) -> dict[str, Any]:
    return {"role": "tool", "name": name, "content": f"Error: {why}"[:500], "failed": True}


def with_types(arguments: dict[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the ``arguments`` of a call to the types in ``schema``.

    Some formats (``qwen3_coder``, ``glm45``) do not quote arguments. Text is therefore parsed as JSON if the schema
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
        return "(truncated)..." + text[-longest:]
    if side == "right":
        return text[:longest] + "...(truncated)"
    half = longest // 2
    return text[:half] + "...(truncated)..." + text[len(text) - half :]


def read_arguments(written: Any) -> Any:
    """Return arguments as a mapping if they are a JSON object or a string that contains one, as in OpenAI's API.

    Null becomes an empty mapping. Other types, and arguments nested more than ``DEEPEST`` levels deep, are returned as
    text.
    """
    value = written
    for _ in range(2):
        if isinstance(value, str):
            with suppress(ValueError, RecursionError):
                value = json.loads(value)
    value = {} if value is None else value
    if isinstance(value, dict) and not nests(value, DEEPEST):
        return value
    return written if isinstance(written, str) else text_of(written) if not nests(written, DEEPEST) else "(too deep)"


def nests(value: Any, levels: int) -> bool:
    """Return whether a JSON value is nested more than ``levels`` levels deep."""
    layer = [value] if isinstance(value, dict | list) else []
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
