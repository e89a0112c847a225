import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import verl.evaluation.benchmarks.loader as loader
from tests.kit import refused
from tests.tables import refusals
from verl.config.errors import ConfigError
from verl.data.arithmetic import ArithmeticTask
from verl.evaluation.benchmarks import BENCHMARKS, load_benchmark
from verl.evaluation.benchmarks.loader import RELEASE
from verl.rewards.registry import VERIFIERS

ROW = {"question": "1+1?", "answer": "2"}


def write(path: Path, *rows: dict | str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")


def test_registry():
    assert len(BENCHMARKS) == 36
    for name, benchmark in BENCHMARKS.items():
        assert benchmark.name == name
        assert benchmark.verifier in VERIFIERS
        assert benchmark.language in ("en", "zh")
        assert benchmark.licence
        # One can be had from the hub, or it is said where else.
        assert bool(benchmark.hub) != bool(benchmark.home)
    elsewhere = {name for name, benchmark in BENCHMARKS.items() if benchmark.home == RELEASE}
    gaokao = {"gaokao2024_I", "gaokao2024_II", "gaokao2024_mix"}
    assert elsewhere == {"math24o", "tabmwp", "carp_en", "cn_middle_school", *gaokao}
    documented = (Path(__file__).parents[3] / "docs" / "evaluation.md").read_text()
    section = documented.partition("### Where benchmarks come from")[2].partition("\n## ")[0]
    assert {name for name in BENCHMARKS if f"| `{name}`" in section or f", `{name}` |" in section} == elsewhere


def test_local_files(tmp_path: Path):
    write(tmp_path / "mine.jsonl", ROW, "", "  ", ROW | {"answer": "3"})
    found = [(p.index, p.question, p.answer, p.data_source) for p in load_benchmark("mine", tmp_path)]
    assert found == [(0, "1+1?", "2", "open_answer"), (1, "1+1?", "3", "open_answer")]
    write(tmp_path / "mine" / "test.jsonl", ROW | {"answer": "4"})
    assert [p.answer for p in load_benchmark("mine", tmp_path)] == ["4"]
    write(tmp_path / "table.csv", "Question,Correct Answer,Incorrect Answer 1", '"A, or\nB?",A,"B ""b"""')
    (problem,) = load_benchmark("table", tmp_path)
    assert problem.question.startswith("A, or\nB?\n(A) ")
    assert set(problem.extra_info["options"].values()) == {"A", 'B "b"'}
    pq.write_table(pa.table({"question": ["1+1?"], "answer": ["2"]}), tmp_path / "column.parquet")
    assert [p.answer for p in load_benchmark("column", tmp_path)] == ["2"]


def test_the_hub_is_asked_if_there_is_no_local_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    asked = []

    def load_dataset(*args: str | None, **kwargs: str | None) -> list[dict]:
        asked.append((args, kwargs))
        return [{"query": "Which? (A) 1 (B) 2", "choices": ["(A)1", "(B)2"], "gold": [1]}]

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    write(tmp_path / "gsm8k.jsonl", ROW)
    assert load_benchmark("gsm8k", tmp_path)[0].data_source == "gsm8k" and asked == []
    assert load_benchmark("gaokao_math_qa", tmp_path)[0].answer == "B"
    load_benchmark("asdiv", None, {"question": "query"})
    assert asked == [
        (("hails/agieval-gaokao-mathqa", None), {"split": "test", "revision": None}),
        (("EleutherAI/asdiv", None), {"split": "validation", "revision": "refs/convert/parquet"}),
    ]


@pytest.mark.parametrize(("name", "line"), refusals("evaluation/refusals.txt", "names"))
def test_benchmarks_that_cannot_be_had(name: str, line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def load_dataset(*args: object, **kwargs: object) -> None:
        raise ConnectionError("Couldn't reach the Hub\nat all")

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    monkeypatch.setattr("verl.data.files._hub_answers", lambda: True)
    write(tmp_path / "mine.jsonl", ROW)
    write(tmp_path / "short.csv", "question,answer", "1+1?")
    write(tmp_path / "quotes.csv", "question,answer", '"1+1?,2')
    with refused(line, TMP=tmp_path):
        load_benchmark(name, tmp_path)


@pytest.mark.parametrize(("content", "line"), refusals("evaluation/refusals.txt", "benchmarks"))
def test_broken_files(content: str, line: str, tmp_path: Path):
    (tmp_path / "mine.jsonl").write_text(eval(content))
    with refused(line, TMP=tmp_path):
        load_benchmark("mine", tmp_path)


def test_the_embedded_task(arithmetic_prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(loader.EMBEDDED, "arithmetic", arithmetic_prompts)
    problems = load_benchmark("arithmetic", None)
    expected = [(p.question, p.answer, "arithmetic") for p in ArithmeticTask().split("train", 16, seed=0)]
    assert [(p.question, p.answer, p.data_source) for p in problems] == expected
    monkeypatch.setitem(loader.EMBEDDED, "arithmetic", tmp_path / "none.parquet")
    with refused("TMP/none.parquet: no such file; restore it with `git checkout data`", TMP=tmp_path):
        load_benchmark("arithmetic", None)


def test_environments_get_extra_info_and_need_no_answer(tmp_path: Path):
    rows = [{"question": "Play.", "extra_info": {"seed": 42}}, {"question": "Play on.", "extra_info": {"seed": 43}}]
    write(tmp_path / "game.jsonl", *rows)
    problems = load_benchmark("game", tmp_path, scored=False)
    assert [(p.question, p.answer, p.extra_info["seed"]) for p in problems] == [("Play.", "", 42), ("Play on.", "", 43)]
    with pytest.raises(ConfigError, match="cannot tell which field holds the answer"):
        load_benchmark("game", tmp_path)
    # A record for training, without a data source and a ground truth.
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Play."}]
    write(tmp_path / "chat.jsonl", {"prompt": chat, "extra_info": {"seed": 7}})
    (problem,) = load_benchmark("chat", tmp_path, scored=False)
    assert (problem.messages, problem.extra_info, problem.data_source) == (chat, {"seed": 7}, "environment")
