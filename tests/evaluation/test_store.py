"""Samples on disk: what a killed process leaves, what belongs together, and what does not."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from verl.config import ConfigError
from verl.evaluation.store import SampleStore, StoredSample, model_digest

SETTINGS = {"model": "0123", "temperature": 0.6, "stop": ["</s>"], "calculator": None}
PROMPTS = [[1, 2, 3], [4, 5]]


def sample(problem: int, number: int, response: str = "two\nlines \u2028 and 数学 \\boxed{4}") -> StoredSample:
    return StoredSample(problem, number, response, 7, False, {"Effective Rank": 2.5})


def test_samples_come_back_and_the_missing_ones_are_known(tmp_path: Path):
    kept = [sample(0, 0), sample(1, 1, "half a pair: \ud83d")]
    with SampleStore(tmp_path / "deep" / "folder", SETTINGS, PROMPTS) as store:
        assert store.missing(2, 2) == [(0, 0), (0, 1), (1, 0), (1, 1)]
        store.append(kept)
    with SampleStore(tmp_path / "deep" / "folder", SETTINGS, PROMPTS) as store:
        assert list(store.samples.values()) == kept
        assert store.missing(2, 2) == [(0, 1), (1, 0)]
        assert store.missing(1, 1) == []


@pytest.mark.parametrize("cut", [1, 2, 30])
def test_a_torn_last_line_is_dropped(cut: int, tmp_path: Path):
    with SampleStore(tmp_path, SETTINGS, PROMPTS) as store:
        store.append([sample(0, 0), sample(0, 1)])
    path = tmp_path / "samples.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    with SampleStore(tmp_path, SETTINGS, PROMPTS) as store:
        assert list(store.samples) == [(0, 0)]
        store.append([sample(1, 0)])
    assert [json.loads(line)["problem"] for line in path.read_text().split("\n")[:-1]] == [0, 1]


def test_a_line_damaged_in_the_middle_is_named(tmp_path: Path):
    with SampleStore(tmp_path, SETTINGS, PROMPTS) as store:
        store.append([sample(0, 0), sample(0, 1), sample(1, 0)])
    path = tmp_path / "samples.jsonl"
    lines = path.read_text().split("\n")
    for damaged in ('{"problem": 0, "sam', "[1]", '{"problem": 3}'):
        path.write_text("\n".join([lines[0], damaged, *lines[2:]]))
        with pytest.raises(ConfigError, match=r"samples\.jsonl, line 2: .* remove the line to have it made again"):
            SampleStore(tmp_path, SETTINGS, PROMPTS)


def test_other_settings_are_refused_and_named(tmp_path: Path):
    SampleStore(tmp_path, SETTINGS, PROMPTS).__exit__()
    with pytest.raises(ConfigError) as caught:
        SampleStore(tmp_path, {**SETTINGS, "temperature": 1.0, "stop": []}, PROMPTS)
    assert str(caught.value) == (
        f"{tmp_path}: holds samples made with temperature=0.6, now 1.0, stop=['</s>'], now []; name another "
        "trainer.default_local_dir, or remove that folder"
    )
    # Numbers that JSON writes alike are alike.
    SampleStore(tmp_path, {**SETTINGS, "stop": ("</s>",)}, PROMPTS).__exit__()


def test_other_prompts_are_refused_and_more_are_welcome(tmp_path: Path):
    SampleStore(tmp_path, SETTINGS, PROMPTS).__exit__()
    with pytest.raises(ConfigError, match=r"other prompts: 1 of 2 differ, the first is problem 1; name another"):
        SampleStore(tmp_path, SETTINGS, [[1, 2, 3], [4, 5, 6]])
    SampleStore(tmp_path, SETTINGS, [*PROMPTS, [7]]).__exit__()
    # The longer list is remembered, and a shorter one still belongs to it.
    SampleStore(tmp_path, SETTINGS, PROMPTS[:1]).__exit__()
    with pytest.raises(ConfigError, match="the first is problem 2"):
        SampleStore(tmp_path, SETTINGS, [*PROMPTS, [8]])


def test_samples_without_their_settings_are_not_touched(tmp_path: Path):
    (tmp_path / "samples.jsonl").write_text("someone else's\n")
    with pytest.raises(ConfigError, match=r"holds samples\.jsonl without generation\.json"):
        SampleStore(tmp_path, SETTINGS, PROMPTS)
    (tmp_path / "generation.json").write_text("{")
    with pytest.raises(ConfigError, match=r"generation\.json: is damaged"):
        SampleStore(tmp_path, SETTINGS, PROMPTS)
    assert (tmp_path / "samples.jsonl").read_text() == "someone else's\n"


def test_nothing_is_stored_twice(tmp_path: Path):
    with SampleStore(tmp_path, SETTINGS, PROMPTS) as store:
        store.append([sample(0, 0)])
        with pytest.raises(AssertionError):
            store.append([replace(sample(0, 0), response="again")])


def test_models_are_told_apart_by_content_and_not_by_place(tmp_path: Path):
    def make(name: str, weights: bytes, ends: int = 2) -> str:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "generation_config.json").write_text(f'{{"eos_token_id": {ends}}}')
        (folder / "model.safetensors").write_bytes(weights)
        (folder / "README.md").write_text(name)
        return str(folder)

    a, b, c = make("a", b"0" * 3_000_000), make("b", b"0" * 3_000_000), make("c", b"0" * 2_999_999 + b"1")
    assert model_digest(a) == model_digest(b) != model_digest(c)
    assert model_digest(make("d", b"0" * 3_000_000, ends=3)) != model_digest(a)
    # Of a large file, pieces all over it.
    size = 30_000_000
    changed = make("f", b"0" * (size // 2 - 500_000) + b"1" * 1_000_000 + b"0" * (size // 2 - 500_000))
    assert model_digest(make("e", b"0" * size)) != model_digest(changed)
    assert model_digest("Qwen/Qwen2.5-1.5B") == "Qwen/Qwen2.5-1.5B"
    with pytest.raises(ConfigError, match="gone: the model cannot be read: No such file or directory; was it removed"):
        model_digest(str(tmp_path / "gone"))
