import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import verl.evaluation.benchmarks.loader as loader
from verl.config.errors import ConfigError
from verl.data.arithmetic import ArithmeticTask
from verl.evaluation.benchmarks import BENCHMARKS, load_benchmark
from verl.evaluation.benchmarks.loader import RELEASE
from verl.rewards.registry import VERIFIERS

ROW = {"question": "1+1?", "answer": "2"}


def write(path: Path, *rows: dict | str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")


def raising(error: Exception) -> Callable[..., None]:
    """A function that raises an error, whatever it is given."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise error

    return refuse


def message_of(name: str, folder: Path | None) -> str:
    with pytest.raises(ConfigError) as error:
        load_benchmark(name, folder)
    assert "\n" not in str(error.value)
    return str(error.value)


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
    for row, message in (
        ("1+1?", "row 1: does not have the 2 columns"),
        ('"1+1?,2', "not a table of comma-separated values"),
    ):
        write(tmp_path / "broken.csv", "question,answer", row)
        assert message in message_of("broken", tmp_path)


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


def test_no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr("datasets.load_dataset", raising(ConnectionError("Couldn't reach the Hub\nat all")))
    message = message_of("gsm8k", tmp_path)
    reason = "no such file, and the hub's set cannot be loaded: ConnectionError: Couldn't reach the Hub; "
    assert message.startswith(f"benchmark gsm8k: openai/gsm8k:main:test: {reason}")
    assert message.endswith("; or put it into data.benchmark_dir as gsm8k/test.jsonl")
    assert message_of("tabmwp", tmp_path) == (
        "benchmark tabmwp: no copy on the hub is known; get tabmwp/test.jsonl from "
        "https://github.com/hf618/VERL/tree/main/examples/simplelr_math_eval/data and put it into data.benchmark_dir "
        "as tabmwp/test.jsonl"
    )


def test_unknown_names(tmp_path: Path):
    write(tmp_path / "my_own_set.jsonl", ROW)
    assert message_of("Math5000", tmp_path) == (
        f"benchmarks='Math5000': no such benchmark; did you mean 'math500'? One of your own goes into "
        f"{tmp_path}/Math5000/test.jsonl"
    )
    assert "did you mean 'my_own_set'?" in message_of("my-own-set", tmp_path)
    assert "did you mean 'OlymMATH-EN-HARD'?" in message_of("olymmath_en_hard", None)
    assert "known are arithmetic, arithmetic_tools, word_problems, math24o, " in message_of("zzzzzz", tmp_path)
    assert message_of("../secret", tmp_path).startswith("benchmarks='../secret': no such benchmark")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([ROW, "", '{"question": "1+1?", "answer": '], "line 3: is not JSON: Expecting value, column 32"),
        ([], "holds no problem at all"),
        (["", " "], "holds no problem at all"),
        ([ROW, "", {"question": "1+1?", "answer": ""}], "line 3: has no answer in answer"),
        ([{"text": "1+1?", "answer": "2"}], "cannot tell which field holds the question; its fields are text, answer"),
    ],
)
def test_broken_files(tmp_path: Path, lines: list[dict | str], message: str):
    path = tmp_path / "mine.jsonl"
    write(path, *lines)
    text = message_of("mine", tmp_path)
    assert text.startswith(str(path)) and message in text


def test_the_embedded_task(arithmetic_prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(loader.EMBEDDED, "arithmetic", arithmetic_prompts)
    problems = load_benchmark("arithmetic", None)
    expected = [(p.question, p.answer, "arithmetic") for p in ArithmeticTask().split("train", 16, seed=0)]
    assert [(p.question, p.answer, p.data_source) for p in problems] == expected
    monkeypatch.setitem(loader.EMBEDDED, "arithmetic", tmp_path / "none.parquet")
    assert message_of("arithmetic", None).endswith("none.parquet: no such file; restore it with `git checkout data`")
