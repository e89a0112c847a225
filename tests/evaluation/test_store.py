"""Samples on disk: what a killed process leaves, and which samples may share a folder."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.kit import harm, refused
from tests.tables import cases, refusals
from verl.config import ConfigError
from verl.evaluation.store import FIX, SampleStore, StoredSample

SETTINGS = {"model": "0123", "temperature": 0.6, "stop": ["</s>"], "calculator": {"enable": True, "diff_stride": 20}}
PROMPTS = [[1, 2, 3], [4, 5]]
SAMPLE = {"problem": 0, "sample": 1, "response": "", "num_tokens": 1, "truncated": False, "metrics": {}}


def sample(problem: int, number: int, response: str = "two\nlines \u2028 and 数学 \\boxed{4}") -> StoredSample:
    return StoredSample(problem, number, response, 7, False, {"Effective Rank": 2.5})


def reopen(folder: Path, prompts: list[list[int]] = PROMPTS, **settings: Any) -> None:
    SampleStore(folder, SETTINGS | settings, prompts).__exit__()


def fill(folder: Path, *samples: StoredSample) -> Path:
    """A store with samples; its file."""
    with SampleStore(folder, SETTINGS, PROMPTS) as store:
        store.append(samples)
    return folder / "samples.jsonl"


def test_samples_come_back_and_the_missing_ones_are_known(tmp_path: Path):
    kept = [sample(0, 0), replace(sample(1, 1, "half a pair: \ud83d"), token_ids=[5, 6])]
    with SampleStore(tmp_path / "deep" / "folder", SETTINGS, PROMPTS) as store:
        assert store.missing(2) == [(0, 0), (0, 1), (1, 0), (1, 1)]
        store.append(kept)
        with pytest.raises(AssertionError):
            store.append([replace(kept[0], response="stored twice")])
    with SampleStore(tmp_path / "deep" / "folder", SETTINGS, PROMPTS) as store:
        assert list(store.samples.values()) == kept
        assert store.missing(2) == [(0, 1), (1, 0)]
    with SampleStore(tmp_path / "deep" / "folder", SETTINGS, PROMPTS[:1]) as store:
        assert store.missing(1) == []


@pytest.mark.parametrize("cut", [1, 2, 30])
def test_an_incomplete_last_line_is_dropped(cut: int, tmp_path: Path):
    path = fill(tmp_path, sample(0, 0), sample(0, 1))
    path.write_bytes(path.read_bytes()[:-cut])
    with SampleStore(tmp_path, SETTINGS, PROMPTS) as store:
        assert list(store.samples) == [(0, 0)]
        store.append([sample(1, 0)])
    assert [json.loads(line)["problem"] for line in path.read_text().split("\n")[:-1]] == [0, 1]


@pytest.mark.parametrize(("line",), cases("evaluation/refusals.txt", "lines"))
def test_a_damaged_line_in_the_middle_is_named(line: str, tmp_path: Path):
    path = fill(tmp_path, sample(0, 0), sample(0, 1), sample(1, 0))
    lines = path.read_text().split("\n")
    path.write_text("\n".join([lines[0], eval(line), *lines[2:]]))
    with refused(f"{path}, line 2 is damaged; remove that line and run the same command again"):
        reopen(tmp_path)


@pytest.mark.parametrize(("change", "settings", "prompts", "line"), refusals("evaluation/refusals.txt", "folders"))
def test_folders_that_are_not_touched(change: str, settings: str, prompts: str, line: str, tmp_path: Path):
    content = fill(tmp_path, sample(0, 0), sample(0, 1), sample(1, 0)).read_text()
    harm(tmp_path, change)
    with refused(line.replace("FIX", FIX), TMP=tmp_path):
        SampleStore(tmp_path, eval(settings), eval(prompts))
    assert (tmp_path / "samples.jsonl").read_text() == content


def test_settings_that_json_writes_alike_and_further_prompts(tmp_path: Path):
    reopen(tmp_path)
    reopen(tmp_path, stop=("</s>",))
    reopen(tmp_path, [*PROMPTS, [7]])
    # The longer list is recorded, and a shorter one still belongs to it.
    reopen(tmp_path, PROMPTS[:1])
    with pytest.raises(ConfigError, match="the first is problem 2"):
        reopen(tmp_path, [*PROMPTS, [8]])
