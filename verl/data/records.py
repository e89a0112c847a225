"""Record schemas for prompts (veRL's layout) and for supervised fine-tuning conversations."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl.config.errors import ConfigError
from verl.utils.files import replacing

TEXT = pa.string()

MESSAGES = pa.list_(pa.struct({"role": TEXT, "content": TEXT}))
"""A chat whose roles are ``system``, ``user`` or ``assistant``."""

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
"""Schema with one prompt per row."""

SFT_SCHEMA = pa.schema({"messages": MESSAGES})
"""Schema with one chat per row. Each chat ends with a message from the assistant."""


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
    """Return a row of ``RL_SCHEMA`` whose prompt is a user message with the question and the instruction.

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


def sft_record(question: str, solution: str) -> dict[str, Any]:
    """Return a row of ``SFT_SCHEMA`` with the question and its worked solution."""
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": solution}]}


def write_parquet(path: Path, records: Sequence[Mapping[str, Any]], schema: pa.Schema) -> None:
    """Write ``records`` to ``path`` atomically, creating the parent folder if it is missing.

    Raises ``pyarrow.ArrowInvalid`` or ``ArrowTypeError`` if a record does not match the schema.
    """
    table = pa.Table.from_pylist(list(records), schema=schema)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        # Checksums let readers detect corrupted pages.
        pq.write_table(table, temporary, write_page_checksum=True)


def read_chat(value: Any, where: str, key: str, option: str, what: str = "prompt") -> list[dict[str, Any]]:
    """Check that ``value`` of the column ``key`` is a list of messages, and return it; error messages call it ``what``.

    Raises:
        ConfigError: if it is malformed or empty. The message names ``where``, the column and its ``option``.
    """
    if not isinstance(value, list) or not all(
        isinstance(message, dict) and {"role", "content"} <= message.keys() for message in value
    ):
        raise ConfigError(
            f"{where}: {key}={value!r:.80}: must be {'text or ' * (what == 'prompt')}a list of messages, each with "
            f"role and content; set {option} if the {what} is in another column"
        )
    for message in value:
        for part in ("role", "content"):
            if not (isinstance(message[part], str) and is_unicode(message[part])):
                raise ConfigError(f"{where}: {key}: the {part} of a message must be text: {message[part]!r:.80}")
    if not any(message["content"].strip() for message in value):
        raise ConfigError(f"{where}: {key}: the {what} is empty; remove the row")
    return value


def is_unicode(text: str) -> bool:
    """Whether ``text`` can be encoded. JSON may contain lone surrogates, which tokenizers reject."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
