"""Rows of data files: local ones, and sets of the hub, of which a folder stands in for the copy that was downloaded."""

import json
import os
import socket
from pathlib import Path

import datasets.config
import huggingface_hub.constants
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.kit import harm
from tests.tables import refusals
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
def test_json_forms_are_read(tmp_path: Path, name: str, text: str):
    (tmp_path / name).write_text(text)
    rows = read_rows(str(tmp_path / name), ["prompt"])
    assert [{key: row[key] for key in ROWS[0]} for row in rows] == ROWS


@pytest.mark.parametrize(("name", "content", "line"), refusals("data/refusals.txt", "files"))
def test_unreadable_file_is_named(tmp_path: Path, refused, name: str, content: str, line: str):
    harm(tmp_path, f"write({name!r}, {content})")
    with refused(line):
        read_rows(str(tmp_path / name), ["prompt"], "data.x")


def test_damaged_parquet_file_is_one_line(tmp_path: Path, refused):
    path = tmp_path / "a.parquet"
    parts = [pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pa.py_buffer(b"x\xff")]
    not_text = pa.table({"good": ["x", "x"], "bad": pa.Array.from_buffers(pa.string(), 2, [None, *parts])})
    for reason, table in {
        "'utf-8' codec can't decode": not_text,
        "days=1073741824; must": pa.table({"a": pa.array([0, 2**30], pa.date32())}),
    }.items():
        pq.write_table(table, path)
        with refused(f"TMP/a.parquet: cannot be read as parquet: {reason}...; get or wri..."):
            read_rows(str(path))
    entries = {"good": ["x"] * 20, "bad": [f"entry {i}" for i in range(20)]}
    options = {"compression": "none", "use_dictionary": False, "write_page_checksum": True, "row_group_size": 10}
    pq.write_table(pa.table(entries), path, **options)  # type: ignore[arg-type]
    path.write_bytes(path.read_bytes().replace(b"entry 17", b"entry 71", 1))
    with refused("TMP/a.parquet: cannot be read as parquet: ..."):
        read_rows(str(path))


def test_field_of_nulls_is_read(tmp_path: Path):
    # As ``datasets`` writes chats whose messages have no calls, here beside a column in dictionary encoding.
    chats = [[{"role": "user", "content": "1", "tool_calls": None}] * 2] * 2
    table = pa.table({"messages": chats, "source": pa.array(["a", "b"]).dictionary_encode()})
    pq.write_table(table, tmp_path / "a.parquet")
    rows = read_rows(str(tmp_path / "a.parquet"))
    assert rows == [{"messages": chat, "source": name} for chat, name in zip(chats, "ab", strict=True)]


def repeated(times: int, size: int) -> pa.Array:
    """A column of ``times`` equal texts of ``size`` characters."""
    return pa.DictionaryArray.from_arrays(pa.array([0] * times), pa.array(["x" * size]))


@pytest.mark.parametrize(
    ("column", "rows"),
    [
        pytest.param(lambda: repeated(50_000, 160_000), 50_000, id="one text in every row, 8 GB"),
        pytest.param(lambda: pa.nulls(1_200_000, pa.string()), 1_200_000, id="rows of nothing"),
        pytest.param(lambda: pa.array(["y" * 120_000_000]), 1, id="one long text"),
        pytest.param(lambda: pa.ListArray.from_arrays([0, 1000], repeated(1000, 1_000_000)), 1, id="one list"),
    ],
)
def test_small_file_of_huge_rows_is_refused(tmp_path: Path, refused, monkeypatch, column, rows: int):
    monkeypatch.setattr("verl.data.files.MAX_BYTES", 100_000_000)  # smaller files exceed it
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"prompt": column()}), path, compression="zstd", row_group_size=10_000_000)
    size = path.stat().st_size
    assert size < 20_000
    with refused(f"TMP/a.parquet: its {size} bytes stand for {rows} rows, which take more than 0.1 GB..."):
        read_rows(str(path))


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_file_larger_than_memory_is_refused(tmp_path: Path, refused, suffix: str):
    path = tmp_path / f"a{suffix}"
    with path.open("wb") as file:
        file.truncate(1 << 43)
    with refused(f"TMP/a{suffix}: has 8796093022208 bytes, but ... bytes of memory are avai..."):
        read_rows(str(path))


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".json"])
def test_path_that_is_no_file_is_refused(tmp_path: Path, refused, suffix: str):
    (tmp_path / f"folder{suffix}").mkdir()
    (tmp_path / f"itself{suffix}").symlink_to(tmp_path / f"itself{suffix}")
    os.mkfifo(tmp_path / f"pipe{suffix}")
    reasons = {"folder": "is not a file; name one", "pipe": "is not a file", "itself": "no such file"}
    reasons["x" * 300] = "cannot be read: File name too long"
    for name, reason in (reasons | {"missing": "no such file"}).items():
        with refused(f"TMP/{name}{suffix}: {reason}..."):
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
def test_hub_set_names(name: str, expected: HubSet | None):
    assert hub_set(name) == expected


def test_hub_set_is_read(tmp_path: Path, refused, monkeypatch: pytest.MonkeyPatch):
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
    with refused("owner/name:hard:train: no such file, and the hub's set ... Unknown split..."):
        read_rows("owner/name:hard:train")
    with refused("owner/name: lacks the columns ['reward_model']..."):
        read_rows("owner/name", ["reward_model"])


def test_hub_without_a_network_is_asked_once(monkeypatch: pytest.MonkeyPatch, refused):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
    asked = []
    monkeypatch.setattr("httpx.Client.send", lambda *_, **__: asked.append(1) or pytest.fail("asked again"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    line = "owner/no-such-set: no such file, and the hub's set cannot be loaded: "
    with refused(f"{line}http://127.0.0.1:... does not answer, and the cache has no copy; check the name..."):
        read_rows("owner/no-such-set")
    assert not asked and not huggingface_hub.constants.HF_HUB_OFFLINE and not datasets.config.HF_HUB_OFFLINE


def test_hub_set_without_a_network_is_one_line(monkeypatch: pytest.MonkeyPatch, refused):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    line = "owner/no-such-set:main:train: no such file, and the hub's set cannot be loaded: "
    with refused(f"{line}...the network, HF_TOKEN for gated sets, and HF_HUB_OFFLINE"):
        read_rows("owner/no-such-set:main:train")
