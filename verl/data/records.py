"""Schemas of records: prompts in veRL's layout, and conversations for supervised fine-tuning."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl.config.errors import ConfigError
from verl.utils.files import replacing
from verl.verifiers.answers import extract_gsm8k

TEXT = pa.string()

MESSAGES = pa.list_(pa.struct({"role": TEXT, "content": TEXT}))
"""A chat. Roles are ``system``, ``user`` and ``assistant``."""

EXTRA_INFO = pa.struct({"split": TEXT, "index": pa.int64(), "question": TEXT, "solution": TEXT, "category": TEXT})

RL_SCHEMA = pa.schema(
    {
        "data_source": TEXT,
        "prompt": MESSAGES,
        "ability": TEXT,
        "reward_model": pa.struct({"style": TEXT, "ground_truth": TEXT}),
        "extra_info": EXTRA_INFO,
    }
)
"""Schema of files with one prompt per row."""

SFT_SCHEMA = pa.schema({"messages": MESSAGES})
"""Schema of files with one chat per row. Each chat ends with an assistant message."""


def rl_record(
    *,
    data_source: str,
    question: str,
    ground_truth: str,
    split: str,
    index: int,
    instruction: str = "",
    solution: str = "",
    category: str = "",
    ability: str = "math",
) -> dict[str, Any]:
    """Return a row of ``RL_SCHEMA``. The prompt is a user message that contains the question and the instruction.

    ``data_source`` selects the verifier (``verl.rewards.registry``). ``category`` is a dataset label, such as a
    difficulty level.
    """
    content = f"{question}\n{instruction}" if instruction else question
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": content}],
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": dict(split=split, index=index, question=question, solution=solution, category=category),
    }


def split_solution(text: str) -> tuple[str, str | None]:
    """Return (answer, ``text``) if ``text`` is a solution with an ending such as ``#### 12``, else (``text``, None)."""
    answer = extract_gsm8k(text)
    return (text, None) if answer is None else (answer, text)


def sft_record(question: str, solution: str) -> dict[str, Any]:
    """Return a row of ``SFT_SCHEMA`` with the question and its worked solution."""
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": solution}]}


def write_parquet(path: Path, records: Sequence[Mapping[str, Any]], schema: pa.Schema) -> None:
    """Write ``records`` to ``path`` atomically. The parent folder is created if it is missing.

    Raises ``pyarrow.ArrowInvalid`` or ``ArrowTypeError`` if a record does not match the schema.
    """
    table = pa.Table.from_pylist(list(records), schema=schema)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        # Checksums let readers detect corrupted pages.
        pq.write_table(table, temporary, write_page_checksum=True)


def read_chat(value: Any, where: str, key: str, option: str, what: str = "prompt") -> list[dict[str, Any]]:
    """Return the messages in ``value``, an entry of the column ``key``, in the format that chat templates expect.

    Null fields are removed, except for the content of messages with tool calls. If the content is a list of text parts,
    they are joined. Tool call arguments become objects, which are empty for null or missing arguments. Error messages
    refer to the chat as ``what``.

    Raises a ``ConfigError`` that contains ``where``, ``key`` and ``option`` if the chat is malformed or empty.
    """
    if not isinstance(value, list) or not all(
        isinstance(message, dict)
        and "role" in message
        and ("content" in message or message.get("tool_calls") or message.get("function_call"))
        for message in value
    ):
        raise ConfigError(
            f"{where}: {key}={value!r:.80}: must be {'text or ' * (what == 'prompt')}a list of messages, each with "
            f"role and content; set {option} if the {what} is in another column"
        )
    messages = [_message(message, f"{where}: {key}") for message in value]
    if not any(message.get("tool_calls") or message["content"].strip() for message in messages):
        raise ConfigError(f"{where}: {key}: the {what} is empty; remove the row")
    return messages


def _message(message: dict[str, Any], where: str) -> dict[str, Any]:
    content, calls = message.get("content"), message.get("tool_calls") or []
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        content = "".join(part["text"] for part in content)
    if message.get("function_call"):
        raise ConfigError(f"{where}: function_call={message['function_call']!r:.80}: write it as one of tool_calls")
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ConfigError(f"{where}: tool_calls={calls!r:.80}: must be a list of objects, each a call")
    for part, text in (("role", message["role"]), ("content", "" if calls and content is None else content)):
        if not (isinstance(text, str) and is_unicode(text)):
            raise ConfigError(f"{where}: the {part} of a message must be text: {text!r:.80}")
    kept = {name: field for name, field in message.items() if field is not None} | {"content": content}
    return kept | {"tool_calls": [_call(call) for call in calls]} if calls else kept


def _call(call: dict[str, Any]) -> dict[str, Any]:
    if isinstance(call.get("function"), dict):
        return call | {"function": _call(call["function"])}
    arguments = {} if call.get("arguments") is None else parse_json(call["arguments"])
    return call | {"arguments": arguments} if isinstance(arguments, dict) else call


def read_tools(row: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """Return a record's tools as a list, parsing JSON text. Raises ``ConfigError`` if the tools are malformed."""
    value = row.get("tools")
    tools = [] if value in (None, "", "null") else parse_json(value)
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ConfigError(f"{where}: tools={value!r:.80}: must be a list of objects, each a tool, or its JSON text")
    return tools


def without_nulls(value: Any) -> Any:
    """Remove null entries of mappings at any depth. They occur because mappings in a parquet column share keys."""
    if isinstance(value, dict):
        return {key: without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [without_nulls(entry) for entry in value] if isinstance(value, list) else value


def parse_json(value: Any) -> Any:
    """Parse ``value`` if it is text, returning None for invalid JSON. Return other values unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None


def is_unicode(text: str) -> bool:
    """Return whether ``text`` is valid Unicode. JSON may contain lone surrogates, which tokenizers reject."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
