"""veRL's tools: classes in a YAML file (``rollout.multi_turn.tool_config_path``) and ``@function_tool`` functions.

The constructor of each class receives ``config`` and ``tool_schema``. As in veRL, each call to a tool creates an
instance with ``async create(create_kwargs=...)``, awaits ``execute(instance_id, parameters, agent_data=...)``, and then
awaits ``release(instance_id)``. ``execute`` returns a response, a reward and metrics, of which only the response is
used. Stubs replace the veRL modules that tool files import. Classes in ``verl.tools`` are loaded from the veRL checkout
that contains the file or the working directory.
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import yaml

from verl.config.errors import ConfigError
from verl.config.paths import find_path
from verl.data.prompt_record import PromptRecord
from verl.utils.user_code import load_code, load_module, user_code

FIELD = "rollout.multi_turn.tool_config_path"
FUNCTION_FIELD = "rollout.multi_turn.function_tool_path"

FUNCTION_TOOL = "_verl_function_tool"
"""Attribute with the tool name and schema of a function decorated with ``@function_tool``. Both default to None."""


class VerlTool:
    """Tool listed in a veRL tool file."""

    is_async = True

    def __init__(self, tool: Any, schema: dict[str, Any]) -> None:
        """Wrap an instance of a veRL tool class together with its schema."""
        self.tool, self.schema = tool, schema
        parameters = inspect.signature(tool.execute).parameters
        takes_rest = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        self.takes_agent_data = takes_rest or "agent_data" in parameters

    async def call(self, arguments: dict[str, Any], agent_data: Any) -> str:
        """Run the tool and return its response as text. The record's ``tools_kwargs`` are passed to ``create``."""
        kwargs = agent_data.tools_kwargs.get(self.schema["function"]["name"]) or {}
        further = {"agent_data": agent_data} if self.takes_agent_data else {}
        instance, _ = await self.tool.create(create_kwargs=kwargs.get("create_kwargs") or {})
        try:
            response, *_ = await self.tool.execute(instance, arguments, **further)
        finally:
            await self.tool.release(instance)
        return str(getattr(response, "text", response) or "")


def agent_data(
    record: PromptRecord, said: list[dict[str, Any]], turns: int, extra_fields: dict[str, Any], tokens: list[int]
) -> "Fields":
    """Return an equivalent of veRL's ``agent_data``, without the tokens of earlier turns.

    Args:
        said: Messages after the prompt.
        turns: Number of policy turns.
        extra_fields: Values that tools keep for later turns of the conversation.
        tokens: Tokens of the last turn.
    """
    return Fields(
        messages=[*record.messages, *said],
        tools_kwargs=record.extra_info.get("tools_kwargs") or {},
        prompt_ids=record.input_ids,
        response_ids=tokens,
        assistant_turns=turns,
        user_turns=turns - 1,
        extra_fields=extra_fields,
        request_id=str(record.uid),
        metrics={},
        image_data=None,
        video_data=None,
    )


def verl_tools(path: str) -> Iterator[VerlTool]:
    """Yield the tools in the YAML file at ``path``. Classes listed without ``tool_schema`` must define one.

    Raises:
        ConfigError: If the file cannot be read, or a class cannot be loaded or created.
    """
    where, path = f"{FIELD}={path!r}", find_path(path)
    entries = listed_tools(path, where)
    install_stubs(Path(path))
    for name, config, schema in entries:
        made = load_code(tool_import_path(name, Path(path)), FIELD)
        if "ray" in vars(inspect.getmodule(made) or made):
            raise ConfigError(f"{where}: {name} uses Ray, which the processes of tools lack; write it without actors")
        with user_code(f"{where}: making {name}"):
            tool = made(config=config, tool_schema=None if schema is None else _as_object(schema))
            wrapped = VerlTool(tool, schema or without_nulls(tool.tool_schema.model_dump()))
        yield wrapped


def listed_tools(path: str, where: str) -> list[tuple[str, dict[str, Any], dict[str, Any] | None]]:
    """Return the class, config and schema of each tool in a YAML file. Raise ``ConfigError`` if it cannot be read."""
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        entries = [(str(e["class_name"]), e.get("config") or {}, e.get("tool_schema")) for e in content["tools"]]
        names = [schema["function"]["name"] for _, _, schema in entries if schema is not None]
        if not all(isinstance(name, str) for name in names) or not entries:
            raise ValueError("there is none, or one whose name is no text")
    except (OSError, yaml.YAMLError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{where}: not a list of tools with class_name and tool_schema: {error!r:.200}") from error
    return entries


def function_tools(path: str) -> list[Callable[..., Any]]:
    """Return the functions in the file at ``path`` that are decorated with veRL's ``@function_tool``, in order.

    Raises:
        ConfigError: If the file cannot be imported or has no such function.
    """
    install_stubs(Path(find_path(path)))
    found = vars(load_module(path, f"{FUNCTION_FIELD}={path!r}")).values()
    functions: list[Callable[..., Any]] = list(
        dict.fromkeys(f for f in found if inspect.isfunction(f) and hasattr(f, FUNCTION_TOOL))
    )
    if not functions:
        raise ConfigError(f"{FUNCTION_FIELD}={path!r}: no function is decorated with @function_tool; decorate one")
    return functions


def function_tool(name: Any = None, *, schema: Any = None) -> Any:
    """Stub for ``verl.tools.function_tool.function_tool``, which can be used with or without arguments."""
    if callable(name):
        return function_tool()(name)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        described = schema.model_dump() if isinstance(schema, Fields) else schema
        setattr(function, FUNCTION_TOOL, (name, described and without_nulls(described)))
        return function

    return decorate


def without_nulls(value: Any) -> Any:
    """Remove null entries from a schema, because veRL omits them from prompts."""
    if isinstance(value, Mapping):
        return {key: without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [without_nulls(entry) for entry in value] if isinstance(value, list) else value


def tool_import_path(name: str, file: Path) -> str:
    """Convert ``package.module.Class`` to an import path, preferring ``module.py`` in the folder of ``file``."""
    module, _, attribute = name.rpartition("." if ":" not in name else ":")
    beside = file.parent / f"{module.rpartition('.')[2]}.py"
    return f"{beside}:{attribute}" if beside.is_file() else f"{module}:{attribute}"


def _as_object(value: Any) -> Any:
    if isinstance(value, Mapping):
        return Fields(**{str(key): _as_object(entry) for key, entry in value.items()})
    return [_as_object(entry) for entry in value] if isinstance(value, list) else value


class Fields(SimpleNamespace):
    """Stub for veRL's schemas and responses. The constructor stores its arguments as attributes."""

    text: str | None = None

    @staticmethod
    def model_validate(value: Any) -> Any:
        """Convert a mapping to an object with attributes."""
        return _as_object(value)

    def model_dump(self, **_: Any) -> dict[str, Any]:
        """Return the attributes as a dictionary."""
        return {name: _as_mapping(value) for name, value in vars(self).items()}


def _as_mapping(value: Any) -> Any:
    if isinstance(value, Fields):
        return value.model_dump()
    if isinstance(value, Mapping):
        return {key: _as_mapping(entry) for key, entry in value.items()}
    return [_as_mapping(entry) for entry in value] if isinstance(value, list) else value


class Schema(Fields):
    """Stub for veRL's schemas, which converts nested mappings to objects with attributes."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**{name: _as_object(value) for name, value in fields.items()})


class BaseTool:
    """Stub for ``verl.tools.base_tool.BaseTool``."""

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        self.config, self.tool_schema = config, tool_schema or self.get_openai_tool_schema()
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> Any:
        """Raise ``ConfigError``. Classes listed without ``tool_schema`` override this method and return the schema."""
        raise ConfigError(f"{type(self).__name__}: has no schema; add tool_schema to the file, or define this method")

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, Fields]:
        """Start an instance."""
        return instance_id or "0", Fields()

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Release an instance."""


def gsm8k_score(
    solution_str: str, ground_truth: str, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """Score the last number like veRL's ``gsm8k.compute_score``. In ``strict`` mode, it must follow ``####``."""
    pattern = r"#### (-?[0-9.,]+)" if method == "strict" else r"(-?[0-9.,]*[0-9][0-9.,]*)"
    found = re.findall(pattern, solution_str)
    if not found:
        return 0.0
    return score if found[-1].replace(",", "").rstrip(".") == ground_truth else format_score


def install_stubs(file: Path) -> None:
    """Make veRL's tool classes importable, and install stubs for the missing modules that they import."""
    parts = ("Property", "Parameters", "", "Tool", "Parsed", "Call")
    names = [*(f"OpenAIFunction{part}Schema" for part in parts), "OpenAIFunctionToolCall"]
    schemas = dict.fromkeys(names, Schema) | {"ToolResponse": Fields}
    modules: dict[str, dict[str, Any]] = {
        "verl.tools": {},
        "verl.tools.base_tool": {"BaseTool": BaseTool, **schemas},
        "verl.tools.schemas": schemas,
        "verl.tools.function_tool": {"function_tool": function_tool},
        "verl.utils.reward_score": {"gsm8k": SimpleNamespace(compute_score=gsm8k_score)},
        "verl.utils.rollout_trace": {"rollout_trace_op": lambda function: function},
    }
    for name, content in modules.items():
        if name not in sys.modules:
            sys.modules[name] = ModuleType(name)
            vars(sys.modules[name]).update(content)
    checkouts = [*file.resolve().parents, Path(find_path("verl/tools")).resolve().parents[1]]
    for name in ("verl.tools", "verl.utils.reward_score"):
        sys.modules[name].__path__ = [f"{folder}/{name.replace('.', '/')}" for folder in checkouts]
