"""Record layouts of prompt data (veRL's) and of supervised data: how files are written, and how chats are read."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl.config.errors import ConfigError
from verl.utils.files import replacing

TEXT = pa.string()

MESSAGES = pa.list_(pa.struct({"role": TEXT, "content": TEXT}))
"""A chat: role is ``system``, ``user`` or ``assistant``."""

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
"""One prompt per row. The same for every data set, so that files of several sets can be read together."""

SFT_SCHEMA = pa.schema({"messages": MESSAGES})
"""One chat per row; the last message is the assistant's."""


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
    """One row of ``RL_SCHEMA``: a single user turn, the question and on a new line the instruction, if any.

    ``data_source`` selects the verifier (``verl.rewards.registry``), ``ground_truth`` is the correct answer,
    ``solution`` a worked solution if the data set has one, and ``category`` the set's own label (kind, level).
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
    """One row of ``SFT_SCHEMA``: the question as the user's turn, the worked solution as the assistant's."""
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": solution}]}


def write_parquet(path: Path, records: Sequence[Mapping[str, Any]], schema: pa.Schema) -> None:
    """Write ``records`` to ``path``; its folder is created if missing.

    The file gets its name only when it is complete, so a reader never sees half of it. Raises ``pyarrow.ArrowInvalid``
    or ``ArrowTypeError`` if a record does not match the schema.
    """
    table = pa.Table.from_pylist(list(records), schema=schema)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        # With checksums, a reader notices a damaged page.
        pq.write_table(table, temporary, write_page_checksum=True)


def read_chat(value: Any, where: str, key: str, option: str, what: str = "prompt") -> list[dict[str, Any]]:
    """Return the chat in the column ``key``, a list of messages; errors call it ``what``.

    Raises:
        ConfigError: it has another form or is empty; names ``where``, the column and ``option``, which names the
            column.
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
    """Whether a text can be encoded: JSON may hold half of a surrogate pair, which no tokenizer takes."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
