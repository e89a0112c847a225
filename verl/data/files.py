"""Rows of data files, local or on the Hugging Face hub."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import load_dataset
from datasets.exceptions import DatasetsError
from huggingface_hub.errors import HfHubHTTPError

from verl.config.data import FILE_SUFFIXES, HubSet, hub_set
from verl.config.errors import ConfigError

Row = dict[str, Any]


def read_rows(name: str, columns: Sequence[str] = (), field: str = "") -> list[Row]:
    """The rows of a parquet, jsonl or json file, or of a set of the hub as :func:`hub_set` reads its name.

    Args:
        columns: what every row must have.
        field: the options that name the columns, to be named in the error.

    Raises:
        ConfigError: there is no such file or set, it cannot be read, or a row lacks one of ``columns``.
    """
    path, published = Path(name), hub_set(name)
    if published is not None:
        rows = _read_hub(name, published)
    elif path.suffix in READERS:
        rows = READERS[path.suffix](path)
    else:
        raise ConfigError(f"{name}: must end in {', '.join(FILE_SUFFIXES)}, or name a hub set, owner/name:config:split")
    for number, row in enumerate(rows):
        missing = [column for column in columns if column not in row]
        if missing:
            where = f"{name}, row {number}" if number else name
            hint = f"; set {field} if they have other names there" if field else ""
            raise ConfigError(f"{where}: lacks the columns {missing}; it has {list(row)}{hint}")
    return rows


def _read_hub(name: str, published: HubSet) -> list[Row]:
    try:
        rows = load_dataset(published.hub_id, published.config or None, split=published.split)
    except (OSError, ValueError, RuntimeError, DatasetsError, HfHubHTTPError) as error:
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}" if str(error) else type(error).__name__
        raise ConfigError(
            f"{name}: no such file, and the hub's set cannot be loaded: {reason}; check the name (owner/name:config:"
            "split), the network, HF_TOKEN for gated sets, and HF_HUB_OFFLINE"
        ) from error
    return [dict(row) for row in rows]


def _read_parquet(path: Path) -> list[Row]:
    try:
        rows: list[Row] = pq.read_table(path).to_pylist()
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file") from error
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        # Also text that is not UTF-8, damaged pages, and dates that Python does not have.
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"{path}: cannot be read as parquet: {reason:.200}; scripts/prepare_data.py writes such files"
        ) from error
    return rows


def _read_jsonl(path: Path) -> list[Row]:
    rows = []
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if line.strip():
            rows.append(_row(_parse(line, f"{path}, line {number}"), f"{path}, line {number}"))
    return rows


def _read_json(path: Path) -> list[Row]:
    text = _text(path)
    if not text.lstrip().startswith("["):
        return _read_jsonl(path)
    return [_row(entry, f"{path}, entry {number}") for number, entry in enumerate(_parse(text, str(path)))]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text: {error.reason} at byte {error.start}") from error


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: is not JSON: {error}") from error


def _row(value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: must be an object with the columns of a record, not {type(value).__name__}")
    return value


READERS: dict[str, Callable[[Path], list[Row]]] = {
    ".parquet": _read_parquet,
    ".jsonl": _read_jsonl,
    ".json": _read_json,
}
"""File suffix -> function that reads all rows. A ``.json`` file is a list, or one object a line."""
