"""Hostile rows and damaged files: the readers of prompts and conversations raise one line that names the file."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import data_options
from hypothesis import strategies as st
from tiny_tokenizer import make_tiny_tokenizer

from tests.fuzzing import DAMAGE, VALUES, damaged, error_of, fuzz, json_lines
from verl.config import SFTConfig, load_config
from verl.data.conversations import ConversationDataset
from verl.data.files import read_rows
from verl.data.prompts import PromptDataset

TOKENIZER = make_tiny_tokenizer()
PROMPTS = data_options(template="chat", max_prompt_length=100_000, truncation="right")
CHATS = replace(load_config(SFTConfig, "sft").data, max_length=100_000, truncation="right")
ROW: dict[str, Any] = {
    "data_source": "arithmetic",
    "prompt": [{"role": "user", "content": "1 + 1?"}],
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 0},
}
CHAT = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
SOURCES = "arithmetic gsm8k math open_answer multiple_choice deepseek_r1 kk countdown searchR1_nq".split()


def parquet(rows: list[dict[str, Any]], **options: Any) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), buffer, **options)
    return buffer.getvalue()


FILES = {
    ".jsonl": [json_lines([ROW, {"messages": CHAT}])],
    ".json": [json.dumps([ROW, ROW], indent=1).encode()],
    ".parquet": [
        parquet([ROW] * 9, row_group_size=4, write_page_checksum=True),
        parquet([{"messages": CHAT}] * 9, compression="none", use_dictionary=False),
    ],
}


def check_prompts(path: Path, *named: str) -> str:
    return error_of(lambda: PromptDataset([str(path)], TOKENIZER, PROMPTS), path, *named)


def check_chats(path: Path, *named: str) -> str:
    return error_of(lambda: ConversationDataset([str(path)], TOKENIZER, CHATS), path, *named)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@fuzz(50, column=st.sampled_from(sorted(ROW)), source=st.sampled_from(SOURCES), value=VALUES)
def rows(folder: Path, column: str, source: str, value: Any):
    path = folder / "rows.jsonl"
    path.write_bytes(json_lines([ROW, ROW | {"data_source": source, column: value}]))
    check_prompts(path, "row 1")
    path.write_bytes(json_lines([ROW, ROW | {"data_source": source, "reward_model": {"ground_truth": value}}]))
    check_prompts(path, "row 1")
    path.write_bytes(json_lines([{"messages": CHAT}, {"messages": value}]))
    check_chats(path, "row 1", "messages")
    path.write_bytes(json_lines([{"messages": CHAT}, {"messages": [*CHAT, {"role": "assistant", "content": value}]}]))
    check_chats(path, "row 1", "messages")


@fuzz(50, suffix=st.sampled_from(sorted(FILES)), damage=DAMAGE, data=st.data())
def files(folder: Path, suffix: str, damage: list, data: st.DataObject):
    path = folder / f"file{suffix}"
    path.write_bytes(damaged(data.draw(st.sampled_from(FILES[suffix])), damage))
    error_of(lambda: read_rows(str(path)), path)
    check_prompts(path)
    check_chats(path)


test_rows, test_many_rows = rows
test_files, test_many_files = files


def test_intact_files_are_read(folder: Path):
    for suffix, contents in FILES.items():
        (folder / f"file{suffix}").write_bytes(contents[0])
        assert len(read_rows(str(folder / f"file{suffix}"))) > 1
    (folder / "good.jsonl").write_bytes(json_lines([ROW, ROW]))
    assert check_prompts(folder / "good.jsonl") == ""
