"""veRL's tool classes, listed in a YAML file of veRL's format (``rollout.multi_turn.tool_config_path``).

Classes are created with ``(config, tool_schema)``. As in veRL, each call uses a separate instance: ``async create(
create_kwargs=...)``, ``execute(instance_id, parameters)``, which returns a response, a reward and metrics, and
``release(instance_id)``; rewards do not affect the score. Stubs replace the veRL modules that these classes import.
Classes in ``verl.tools`` are loaded from the veRL checkout that contains the file or the working directory.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import yaml

from verl.config.errors import ConfigError
from verl.config.paths import find_path
from verl.data.prompt_rows import PromptRecord
from verl.utils.user_code import load_code, user_code

FIELD = "rollout.multi_turn.tool_config_path"


class VerlTool:
    """Tool listed in a veRL tool file."""

    is_async = True

    def __init__(self, tool: Any, schema: dict[str, Any]) -> None:
        """Wrap an instance of a veRL tool class; ``schema`` is its ``tool_schema`` in the file."""
        self.tool, self.schema = tool, schema

    def begin(self, record: PromptRecord) -> Any:
        """Return the record's ``extra_info["tools_kwargs"][name]["create_kwargs"]``."""
        kwargs = record.extra_info.get("tools_kwargs") or {}
        return (kwargs.get(self.schema["function"]["name"]) or {}).get("create_kwargs") or {}

    async def call(self, state: Any, arguments: dict[str, Any]) -> tuple[Any, str, float]:
        """Return the unchanged state, the response of ``execute`` as text, and a reward of 0."""
        instance, _ = await self.tool.create(create_kwargs=state)
        try:
            response, *_ = await self.tool.execute(instance, arguments)
        finally:
            await self.tool.release(instance)
        return state, str(getattr(response, "text", response) or ""), 0.0


def verl_tools(path: str) -> Iterator[VerlTool]:
    """Yield the tools of the file at ``path``.

    Raises:
        ConfigError: If the file cannot be read, or a class cannot be loaded or created.
    """
    where, path = f"{FIELD}={path!r}", find_path(path)
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        entries = [(str(e["class_name"]), e.get("config") or {}, dict(e["tool_schema"])) for e in content["tools"]]
        if not all(isinstance(schema["function"]["name"], str) for _, _, schema in entries) or not entries:
            raise ValueError("there is none, or one whose name is no text")
    except (OSError, yaml.YAMLError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{where}: not a list of tools with class_name and tool_schema: {error!r:.200}") from error
    install_stubs(Path(path))
    for name, config, schema in entries:
        made = load_code(_import_path(name, Path(path)), FIELD)
        with user_code(f"{where}: making {name}"):
            tool = made(config=config, tool_schema=_as_object(schema))
        yield VerlTool(tool, schema)


def _import_path(name: str, file: Path) -> str:
    """Return ``package.module.Class`` as an import path, preferring ``module.py`` next to ``file``."""
    module, _, attribute = name.rpartition("." if ":" not in name else ":")
    beside = file.parent / f"{module.rpartition('.')[2]}.py"
    return f"{beside}:{attribute}" if beside.is_file() else f"{module}:{attribute}"


def _as_object(value: Any) -> Any:
    if isinstance(value, Mapping):
        return Fields(**{str(key): _as_object(entry) for key, entry in value.items()})
    return [_as_object(entry) for entry in value] if isinstance(value, list) else value


class Fields(SimpleNamespace):
    """Stub for veRL's schemas and responses that stores its arguments as attributes."""

    text: str | None = None

    def model_dump(self, **_: Any) -> dict[str, Any]:
        """Return the attributes as a dictionary."""
        return {k: v.model_dump() if isinstance(v, Fields) else v for k, v in vars(self).items()}


class BaseTool:
    """Stub for ``verl.tools.base_tool.BaseTool``."""

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        self.config, self.tool_schema, self.name = config, tool_schema, tool_schema.function.name

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, Fields]:
        """Start an instance."""
        return instance_id or "0", Fields()

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Release an instance."""


def gsm8k_score(
    solution_str: str, ground_truth: str, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """Score like veRL's ``gsm8k.compute_score``, using the last number, or with ``strict`` the one after ``####``."""
    pattern = r"#### (-?[0-9.,]+)" if method == "strict" else r"(-?[0-9.,]*[0-9][0-9.,]*)"
    found = re.findall(pattern, solution_str)
    if not found:
        return 0.0
    return score if found[-1].replace(",", "").rstrip(".") == ground_truth else format_score


def install_stubs(file: Path) -> None:
    """Make veRL's tool classes importable, and install stubs for the missing modules that they import."""
    schemas = dict.fromkeys(("OpenAIFunctionToolSchema", "OpenAIFunctionToolCall", "ToolResponse"), Fields)
    modules: dict[str, dict[str, Any]] = {
        "verl.tools": {},
        "verl.tools.base_tool": {"BaseTool": BaseTool},
        "verl.tools.schemas": schemas,
        "verl.utils.reward_score": {"gsm8k": SimpleNamespace(compute_score=gsm8k_score)},
        "verl.utils.rollout_trace": {"rollout_trace_op": lambda function: function},
    }
    for name, content in modules.items():
        if name not in sys.modules:
            sys.modules[name] = ModuleType(name)
            vars(sys.modules[name]).update(content)
    checkouts = [*file.resolve().parents, Path(find_path("verl/tools")).resolve().parents[1]]
    sys.modules["verl.tools"].__path__ = [f"{folder}/verl/tools" for folder in checkouts]
