"""Readers for local data files and datasets on the Hugging Face hub."""

import csv
import io
import json
import ssl
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from huggingface_hub.errors import HfHubHTTPError

from verl.config.data import FILE_SUFFIXES, HubSet, hub_set
from verl.config.errors import ConfigError
from verl.data.records import without_nulls
from verl.utils.process import memory_limit

Row = dict[str, Any]

MAX_BYTES, MAX_EXPANSION = 1 << 28, 200
"""Memory limit for the rows of a parquet file: ``MAX_BYTES`` or, if larger, ``MAX_EXPANSION`` times the file size."""
OVERHEAD = 4
"""Upper bound on the memory needed to read rows, as a multiple of the size of the rows."""
BYTES_PER_ROW = 100
"""Minimum size of a row in memory, in bytes."""
ROWS_AT_A_TIME = 4096

PROBE_S = 10.0
"""Seconds to wait for a response from the hub before using only the local cache."""

_FIX = "correct or remove it"


def read_rows(name: str, columns: Sequence[str] = (), field: str = "", chats: Sequence[str] = ()) -> list[Row]:
    """Return the rows of a parquet, jsonl or json file, or of a hub dataset (:func:`hub_set`).

    Args:
        columns: names of the columns that every row must have.
        field: options that set the names of columns, for error messages.
        chats: names of columns in which nulls of a parquet file or hub dataset stand for missing keys and are removed.

    Raises ``ConfigError`` if the file or dataset does not exist or cannot be read, or if a row lacks a column.
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
    if path.suffix not in (".jsonl", ".json"):
        rows = [row | {name: without_nulls(row[name]) for name in chats if name in row} for row in rows]
    return rows


def _read_hub(name: str, published: HubSet) -> list[Row]:
    # Imported lazily, because the import takes half a second and local files do not need it.
    import datasets.config
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    modules: list[Any] = [datasets.config, huggingface_hub.constants]
    unreachable = not any(module.HF_HUB_OFFLINE for module in modules) and not _hub_answers()
    try:
        hub_id, config, split, revision = published
        with ExitStack() as restored:
            for module in modules if unreachable else []:  # only the cache is read, as each request would be repeated
                restored.callback(setattr, module, "HF_HUB_OFFLINE", False)
                module.HF_HUB_OFFLINE = True
            rows = load_dataset(hub_id, config or None, split=split, revision=revision or None)
    except (OSError, ValueError, RuntimeError, DatasetsError, HfHubHTTPError) as error:
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}" if str(error) else type(error).__name__
        if unreachable and isinstance(error, ConnectionError):
            reason = f"{huggingface_hub.constants.ENDPOINT} does not answer, and the cache has no copy"
        raise ConfigError(
            f"{name}: no such file, and the hub's set cannot be loaded: {reason}; check the name (owner/name:config:"
            "split), the network, HF_TOKEN for gated sets, and HF_HUB_OFFLINE"
        ) from error
    return [dict(row) for row in rows]


def _hub_answers() -> bool:
    try:
        request = urllib.request.Request(huggingface_hub.constants.ENDPOINT, method="HEAD")
        urllib.request.urlopen(request, timeout=PROBE_S).close()
    except urllib.error.HTTPError:
        return True
    except urllib.error.URLError as error:
        return isinstance(error.reason, ssl.SSLError)  # the hub's library may know other certificates
    except OSError:
        return False
    return True


def _read_parquet(path: Path) -> list[Row]:
    _require_file(path)
    try:
        file, size = pq.ParquetFile(path, page_checksum_verification=True), path.stat().st_size
        groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
        limit = max(MAX_BYTES, MAX_EXPANSION * size)
        needed = max(sum(group.total_byte_size for group in groups), BYTES_PER_ROW * file.metadata.num_rows)
        rows = _rows_in(file, limit) if needed <= limit else None
    # Catch damaged pages, text that is not UTF-8, and dates that Python does not support.
    except (pa.ArrowException, OSError, ValueError, OverflowError, TypeError, KeyError, MemoryError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"{path}: cannot be read as parquet: {reason:.200}; get or write the file again (scripts/prepare_data.py "
            "writes such files)"
        ) from error
    if rows is None:
        raise ConfigError(
            f"{path}: its {size} bytes stand for {file.metadata.num_rows} rows, which take more than "
            f"{limit / 1e9:.1f} GB; write the file again with the rows that it should have"
        )
    return rows


def _rows_in(file: pq.ParquetFile, limit: int) -> list[Row] | None:
    """Return the rows of a file, or None if the rows need more than ``limit`` bytes."""
    rows: list[Row] = []
    num_bytes = 0
    try:
        # The metadata may be wrong, and a single row may be arbitrarily large.
        with memory_limit(OVERHEAD * limit):
            for batch in _batches(file, limit):
                num_bytes += batch.nbytes
                if num_bytes > limit:
                    return None
                rows += batch.to_pylist()
    except MemoryError:
        return None
    return rows


def _batches(file: pq.ParquetFile, limit: int) -> Iterator[pa.Table]:
    """Yield the rows of a file in batches of at most ``limit`` bytes per column."""
    # With dictionary encoding, every row of a group may contain a value as large as the whole group.
    sizes = [file.metadata.row_group(i).total_byte_size for i in range(file.num_row_groups)]
    at_a_time = max(1, min(ROWS_AT_A_TIME, limit // max(1, *sizes, 1)))
    coded = [(i, field) for i, field in enumerate(file.schema_arrow) if pa.types.is_dictionary(field.type)]
    for group in range(file.num_row_groups):
        for batch in file.iter_batches(at_a_time, row_groups=[group]):
            table = pa.Table.from_batches([batch])
            # Decode dictionaries, so that the batch size reflects the size of its rows. pyarrow cannot cast other
            # columns that hold a field of nulls alone, such as the tool_calls of chats without calls.
            for i, field in coded:
                table = table.set_column(i, field.name, table.column(i).cast(field.type.value_type))
            yield table


def read_json_lines(path: Path) -> list[tuple[int, Row]]:
    """Return the objects in a JSON Lines file with their 1-based line numbers. Blank lines are skipped.

    Raises ``ConfigError`` if the file cannot be read or is not UTF-8 text, or if a line is not a JSON object.
    """
    # splitlines() would also split at characters that JSON allows inside strings.
    lines = enumerate(_text(path).split("\n"), start=1)
    named = [(number, line, f"{path}, line {number}") for number, line in lines if line.strip()]
    return [(number, _row(_parse(line, where), where)) for number, line, where in named]


def read_csv(path: Path) -> list[Row]:
    """Return the rows of a CSV file that starts with a header. All values are strings.

    Raises ``ConfigError`` if the file cannot be read or is not UTF-8 text, or if a row does not match the header.
    """
    try:
        reader = csv.DictReader(io.StringIO(_text(path), newline=""), strict=True)
        rows = list(reader)
    except csv.Error as error:
        raise ConfigError(f"{path}: not a table of comma-separated values: {error}; {_FIX}") from error
    for number, row in enumerate(rows, start=1):
        if None in row or None in row.values():
            columns = len(reader.fieldnames or [])
            raise ConfigError(f"{path}, row {number}: does not have the {columns} columns of the first line; {_FIX}")
    return rows


def _read_jsonl(path: Path) -> list[Row]:
    return [row for _, row in read_json_lines(path)]


def _read_json(path: Path) -> list[Row]:
    text = _text(path)
    if not text.lstrip().startswith("["):
        return _read_jsonl(path)
    return [_row(entry, f"{path}, entry {number}") for number, entry in enumerate(_parse(text, str(path)))]


def _require_file(path: Path) -> None:
    try:
        exists = path.exists()
    except OSError as error:  # No permission, or the name is too long.
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    if not exists:
        raise ConfigError(f"{path}: no such file")
    # Reading from a pipe might block forever.
    if not path.is_file():
        raise ConfigError(f"{path}: is not a file; name one")


def _text(path: Path) -> str:
    _require_file(path)
    size, available = path.stat().st_size, psutil.virtual_memory().available
    if size > available:  # A sparse file can have any size.
        raise ConfigError(f"{path}: has {size} bytes, but {available} bytes of memory are available; give a part of it")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path}, line {line}: is not UTF-8 text: {error.reason} at byte {error.start}; unpack it, or write it in "
            "UTF-8"
        ) from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        line = f" of line {error.lineno}" if error.lineno > 1 else ""
        raise ConfigError(f"{where}: is not JSON: {error.msg}, column {error.colno}{line}; {_FIX}") from error
    except RecursionError as error:
        raise ConfigError(f"{where}: is nested too deeply; {_FIX}") from error
    except ValueError as error:  # A duplicate key, or an integer with thousands of digits.
        raise ConfigError(f"{where}: {str(error).partition(';')[0]}; {_FIX}") from error


def _object(pairs: list[tuple[str, Any]]) -> Row:
    """Return a JSON object as a dictionary. Raises ``ValueError`` for duplicate keys, which are ambiguous."""
    row = dict(pairs)
    if len(row) < len(pairs):
        duplicate = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"has the key {duplicate!r:.80} twice")
    return row


def _row(value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: must be an object with the columns of a record, not {type(value).__name__}")
    return value


READERS: dict[str, Callable[[Path], list[Row]]] = {
    ".parquet": _read_parquet,
    ".jsonl": _read_jsonl,
    ".json": _read_json,
}
"""Maps file suffixes to functions that read all rows. ``.json`` files contain a list or one object per line."""
