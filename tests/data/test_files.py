"""Rows of data files: local ones, and sets of the hub, of which a folder stands in for the copy that was downloaded."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl.config import ConfigError
from verl.config.data import HubSet, hub_set
from verl.data.files import read_rows

ROWS = [{"prompt": "1?", "answer": 1}, {"prompt": "2?", "answer": {"target": 24}}]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rows.jsonl", "\n".join(map(json.dumps, ROWS)) + "\n\n"),
        ("rows.json", json.dumps(ROWS, indent=1)),
        ("lines.json", "\n".join(map(json.dumps, ROWS))),
        # U+2028 is no end of a line in JSON.
        ("more.jsonl", '{"prompt": "1?", "answer": 1}\n{"prompt": "2?", "answer": {"target": 24}, "x": "\u2028"}'),
    ],
)
def test_json(tmp_path: Path, name: str, text: str):
    (tmp_path / name).write_text(text)
    rows = read_rows(str(tmp_path / name), ["prompt"])
    assert [{key: row[key] for key in ROWS[0]} for row in rows] == ROWS


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"prompt": 1}\n{"prompt"', "{path}, line 2: is not JSON: Expecting ':'"),
        ("a.jsonl", "[1]", "{path}, line 1: must be an object with the columns of a record, not list"),
        ("a.json", '[{"prompt": 1}, 2]', "{path}, entry 1: must be an object with the columns of a record, not int"),
        ("a.jsonl", '{"prompt": 1}\n{"p": 1}', "{path}, row 1: lacks the columns ['prompt']; it has ['p']; set data.x"),
        ("a.parquet", '{"prompt": 1}', "{path}: cannot be read as parquet: Parquet magic bytes not"),
        ("a.csv", "prompt\n1", "{path}: must end in .parquet, .jsonl, .json, or name a hub set, owner/name:config:spl"),
        ("a.jsonl", b'{"prompt": 1}\n\xff', "{path}, line 2: is not UTF-8 text: invalid start byte at byte 14; unpa"),
        ("a.jsonl", '{"prompt": 1}\n\0\0', "{path}, line 2: is not JSON: Expecting value, column 1; correct or remove"),
        ("a.jsonl", "[" * 100_000, "{path}, line 1: is nested too deeply; correct or remove it"),
        (
            "a.json",
            '[{"prompt": ' + "[" * 2000 + "]" * 2000 + "}]",
            "{path}: is nested too deeply; correct or remove it",
        ),
        ("a.jsonl", '{"prompt": ' + "1" * 5000 + "}", "{path}, line 1: Exceeds the limit (4300 digits) for integer"),
        ("a.jsonl", '{"prompt": {"a": 1, "a": 2}}', "{path}, line 1: has the key 'a' twice; correct or remove it"),
        (
            "a.json",
            '[{"prompt": 1},\n{"prompt" 2}]',
            "{path}: is not JSON: Expecting ':' delimiter, column 11 of line 2",
        ),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str, text: str | bytes, message: str):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match="^" + re.escape(message.format(path=path))):
        read_rows(str(path), ["prompt"], "data.x")


def test_a_damaged_parquet_file_is_one_line(tmp_path: Path):
    path = tmp_path / "a.parquet"
    parts = [pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pa.py_buffer(b"x\xff")]
    not_text = pa.table({"good": ["x", "x"], "bad": pa.Array.from_buffers(pa.string(), 2, [None, *parts])})
    for reason, table in {
        "'utf-8' codec can't decode": not_text,
        "days=1073741824; must": pa.table({"a": pa.array([0, 2**30], pa.date32())}),
    }.items():
        pq.write_table(table, path)
        with pytest.raises(ConfigError, match=f"^{path}: cannot be read as parquet: {reason}.*; get or wri"):
            read_rows(str(path))
    entries = {"good": ["x"] * 20, "bad": [f"entry {i}" for i in range(20)]}
    options = {"compression": "none", "use_dictionary": False, "write_page_checksum": True, "row_group_size": 10}
    pq.write_table(pa.table(entries), path, **options)  # type: ignore[arg-type]
    path.write_bytes(path.read_bytes().replace(b"entry 17", b"entry 71", 1))
    with pytest.raises(ConfigError, match="cannot be read as parquet: "):
        read_rows(str(path))


def repeated(times: int, size: int) -> pa.Array:
    """A column of ``times`` equal texts of ``size`` characters."""
    return pa.DictionaryArray.from_arrays(pa.array([0] * times), pa.array(["x" * size]))


@pytest.mark.parametrize(
    ("column", "rows"),
    [
        (lambda: repeated(500_000, 160_000), 500_000),
        (lambda: pa.nulls(3_000_000, pa.string()), 3_000_000),
        (lambda: pa.array(["y" * 300_000_000]), 1),
        (lambda: pa.ListArray.from_arrays([0, 10_000], repeated(10_000, 1_000_000)), 1),
    ],
    ids=[
        "one text in every row, 80 GB",
        "rows of nothing",
        "one long text",
        "one text in a list, 10 GB",
    ],
)
def test_a_small_file_does_not_fill_the_memory(tmp_path: Path, column: Callable[[], pa.Array], rows: int):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"prompt": column()}), path, compression="zstd", row_group_size=10_000_000)
    size = path.stat().st_size
    assert size < 20_000
    with pytest.raises(
        ConfigError, match=f"^{path}: its {size} bytes stand for {rows} rows, which take more than 0.3 GB"
    ):
        read_rows(str(path))


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_a_file_of_holes_that_is_larger_than_the_memory(tmp_path: Path, suffix: str):
    path = tmp_path / f"a{suffix}"
    with path.open("wb") as file:
        file.truncate(1 << 43)
    with pytest.raises(ConfigError, match=f"^{path}: has 8796093022208 bytes, but [0-9]+ bytes of memory are avai"):
        read_rows(str(path))


def test_a_column_of_few_values_is_read_as_its_values(tmp_path: Path):
    names = pa.array(["a", "b", "a"]).dictionary_encode()
    pq.write_table(pa.table({"name": names, "list": [[1], None, [2, 3]]}), tmp_path / "a.parquet", row_group_size=2)
    read = [{"name": "a", "list": [1]}, {"name": "b", "list": None}, {"name": "a", "list": [2, 3]}]
    assert read_rows(str(tmp_path / "a.parquet")) == read


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".json"])
def test_what_has_the_name_of_a_file_and_is_none(tmp_path: Path, suffix: str):
    (tmp_path / f"folder{suffix}").mkdir()
    (tmp_path / f"itself{suffix}").symlink_to(tmp_path / f"itself{suffix}")
    os.mkfifo(tmp_path / f"pipe{suffix}")
    reasons = {"folder": "is not a file; name one", "pipe": "is not a file", "itself": "no such file"}
    reasons["x" * 300] = "cannot be read: File name too long"
    for name, reason in (reasons | {"missing": "no such file"}).items():
        with pytest.raises(ConfigError, match=f"^{tmp_path}/{name}{suffix}: {reason}"):
            read_rows(f"{tmp_path}/{name}{suffix}")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("openai/gsm8k", HubSet("openai/gsm8k", "", "train")),
        ("openai/gsm8k:test", HubSet("openai/gsm8k", "", "test")),
        ("openai/gsm8k:main:test", HubSet("openai/gsm8k", "main", "test")),
        ("openai/gsm8k::train[:100]", HubSet("openai/gsm8k", "", "train[:100]")),
        ("a/b@refs/convert/parquet:validation", HubSet("a/b", "", "validation", "refs/convert/parquet")),
        ("mine/train.parquet", None),
        ("data/arithmetic", None),
        ("/data/gsm8k", None),
        ("a/b/c", None),
        ("gsm8k", None),
    ],
)
def test_names_of_hub_sets(name: str, expected: HubSet | None):
    assert hub_set(name) == expected


def test_a_set_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "owner" / "name"
    (folder / "hard").mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist([{"prompt": "1?"}]), folder / "hard" / "test.parquet")
    pq.write_table(pa.Table.from_pylist([{"prompt": "2?"}, {"prompt": "3?"}]), folder / "train.parquet")
    configs = [("default", "train", "train.parquet"), ("hard", "test", "hard/test.parquet")]
    files = "".join(
        f"- config_name: {name}\n  data_files:\n  - split: {split}\n    path: {path}\n" for name, split, path in configs
    )
    (folder / "README.md").write_text(f"---\nconfigs:\n{files}---\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    assert read_rows("owner/name") == [{"prompt": "2?"}, {"prompt": "3?"}]
    assert read_rows("owner/name:hard:test", ["prompt"]) == [{"prompt": "1?"}]
    with pytest.raises(ConfigError, match="^owner/name:hard:train: no such file, and the hub's set .* Unknown split"):
        read_rows("owner/name:hard:train")
    with pytest.raises(ConfigError, match=r"^owner/name: lacks the columns \['reward_model'\]"):
        read_rows("owner/name", ["reward_model"])


def test_a_hub_set_without_a_network_is_one_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError) as caught:
        read_rows("owner/no-such-set:main:train")
    message = str(caught.value)
    assert message.startswith("owner/no-such-set:main:train: no such file, and the hub's set cannot be loaded: ")
    assert message.endswith("the network, HF_TOKEN for gated sets, and HF_HUB_OFFLINE") and "\n" not in message
