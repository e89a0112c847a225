"""Samples on disk: what a killed process leaves, and which samples may share a folder."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from verl.config import ConfigError
from verl.evaluation.store import SampleStore, StoredSample

SETTINGS = {"model": "0123", "temperature": 0.6, "stop": ["</s>"], "calculator": {"enable": True, "diff_stride": 20}}
PROMPTS = [[1, 2, 3], [4, 5]]


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


SAMPLE = {"problem": 0, "sample": 1, "response": "", "num_tokens": 1, "truncated": False, "metrics": {}}


@pytest.mark.parametrize(
    "damaged",
    [
        *('{"problem": 0, "sam', "[1]", '{"problem": 3}', "[" * 9999, "7" * 5000, "\0\0", "NaN"),
        *(
            json.dumps(SAMPLE | wrong)
            for wrong in (
                *({"problem": [0]}, {"problem": "0"}, {"problem": True}, {"response": None}, {"truncated": 0}),
                *({"metrics": []}, {"metrics": {"a": "x"}}, {"num_tokens": 1.5}, {"more": 1}),
            )
        ),
    ],
)
def test_a_damaged_line_in_the_middle_is_named(damaged: str, tmp_path: Path):
    path = fill(tmp_path, sample(0, 0), sample(0, 1), sample(1, 0))
    lines = path.read_text().split("\n")
    path.write_text("\n".join([lines[0], damaged, *lines[2:]]))
    with pytest.raises(ConfigError, match=r"samples\.jsonl, line 2 is damaged; remove that line and run the same"):
        reopen(tmp_path)


def test_other_settings_are_refused_and_named(tmp_path: Path):
    reopen(tmp_path)
    changed = r"temperature=0\.6, now 1\.0, stop=\['</s>'\], now \[\]"
    fix = r"name another trainer\.default_local_dir, or remove that folder"
    with pytest.raises(ConfigError, match=rf"^{tmp_path}: holds samples made with {changed}; {fix}$"):
        reopen(tmp_path, temperature=1.0, stop=[])
    # Values that JSON writes alike are alike.
    reopen(tmp_path, stop=("</s>",))


def test_other_prompts_are_refused_and_further_ones_are_added(tmp_path: Path):
    reopen(tmp_path)
    with pytest.raises(ConfigError, match=r"other prompts: 1 of 2 differ, the first is problem 1; name another"):
        reopen(tmp_path, [[1, 2, 3], [4, 5, 6]])
    reopen(tmp_path, [*PROMPTS, [7]])
    # The longer list is recorded, and a shorter one still belongs to it.
    reopen(tmp_path, PROMPTS[:1])
    with pytest.raises(ConfigError, match="the first is problem 2"):
        reopen(tmp_path, [*PROMPTS, [8]])


def test_samples_without_their_settings_are_not_touched(tmp_path: Path):
    (tmp_path / "samples.jsonl").write_text("someone else's\n")
    with pytest.raises(ConfigError, match=r"holds samples\.jsonl without generation\.json"):
        reopen(tmp_path)
    settings = '{"settings": %s, "prompts": %s}'
    for damaged in ("{", "[]", "[" * 9999, settings % ("[1]", "[]"), settings % ("{}", "3")):
        (tmp_path / "generation.json").write_text(damaged)
        with pytest.raises(ConfigError, match=r"generation\.json is damaged"):
            reopen(tmp_path)
    assert (tmp_path / "samples.jsonl").read_text() == "someone else's\n"
