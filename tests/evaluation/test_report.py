"""What an evaluation leaves behind: the files of each result, tables, the page, and trackers' records."""

import csv
import io
import json
import math
from dataclasses import replace
from datetime import date
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
from rich.console import Console

from tests.chromium import PageText
from tests.evaluation.example_results import (
    HOSTILE,
    TWO_RUNS,
    hostile_result,
    problem,
    result,
    sample,
    with_metrics,
)
from tests.evaluation.example_tasks import evaluation_config
from verl.evaluation.report.publish import publish, write_results
from verl.evaluation.report.tables import comparison_table, csv_text, markdown, overview_table, terminal_table
from verl.evaluation.reranking import with_scores
from verl.evaluation.results import ProblemResult, result_folder, row_labels, safe_name, write_result
from verl.evaluation.statistics import summarise
from verl.evaluation.targets import Target
from verl.run.display import RunDisplay
from verl.utils.portable import printable


def test_labels_name_the_temperature_only_if_needed():
    assert row_labels([result(["c"]), result(["w"], step=300)]) == ["grpo@0", "grpo@300"]
    # Each benchmark has its own temperature: the benchmark distinguishes them.
    assert row_labels([result(["c"]), result(["w"], benchmark="gsm8k", temperature=0.0)]) == ["grpo@0", "grpo@0"]
    both = [result(["c"]), result(["c"], temperature=0.6), result(["c"], step=5)]
    assert row_labels(both) == ["grpo@0 T=1", "grpo@0 T=0.6", "grpo@5"]


def test_files_of_a_result(tmp_path: Path):
    metrics = {"Effective Rank": [1.5, math.inf], "Curvature": [0.1, 0.2]}
    (measured,) = with_metrics(result(["cw"]), metrics).problems
    said = [{"by": "policy", "text": "2 × 3?"}, {"by": "environment", "text": "6"}]
    measured.samples[1] = replace(measured.samples[1], conversation=said)
    written = result([measured, problem(1, ""), problem(2, "n")])
    folder = write_result(tmp_path, written, {"pass@1": 0.25, "undefined": math.nan})
    assert folder == tmp_path / "grpo" / "step_0" / "aime24" / "T1"
    assert json.loads((folder / "results.json").read_text()) == {
        **{"run": "grpo", "step": 0, "benchmark": "aime24", "temperature": 1.0},
        "figures": {"pass@1": 0.25, "undefined": None},
        "problems": [
            {"index": i, "question": f"What is problem {i}?", "answer": "7", "samples": samples, "correct": correct}
            for i, (samples, correct) in enumerate([(2, 1), (0, 0), (1, 0)])
        ],
    }
    rows = pq.read_table(folder / "samples.parquet").to_pylist()
    given = {"problem": 0, "sample": 0, "response": "So it is \\boxed{7}.", "num_tokens": 10, "truncated": False}
    verdict = {"correct": True, "answer": "7", "reason": "correct", "reward_extra_info": None}
    verdict |= {"conversation": None, "score": None}
    assert rows[0] == given | verdict | {"metric/Effective Rank": 1.5, "metric/Curvature": 0.1}
    assert list(rows[0])[:2] == ["problem", "sample"]
    found = [(row["problem"], row["sample"], row["reason"], row["metric/Effective Rank"]) for row in rows[1:]]
    assert json.loads(rows[1]["conversation"]) == said
    # A sample without a metric has null.
    assert found == [(0, 1, "wrong", math.inf), (2, 0, "no_answer", None)]


def test_hostile_text_and_no_problems_are_written(tmp_path: Path):
    folder = write_result(tmp_path, hostile_result(), {})
    # UTF-8 cannot represent lone surrogates.
    expected = list((HOSTILE | {"surrogates": "lone \ufffd and \ufffd, pair \U0001f600"}).values())
    rows = pq.read_table(folder / "samples.parquet").to_pylist()
    assert [(row["response"], row["answer"]) for row in rows[::2]] == [(text, text) for text in expected]
    problems = json.loads((folder / "results.json").read_text())["problems"]
    assert [(p["question"], p["answer"]) for p in problems] == [(text, text) for text in HOSTILE.values()]
    folder = write_result(tmp_path, result([]), {})
    assert json.loads((folder / "results.json").read_text())["problems"] == []
    assert pq.read_table(folder / "samples.parquet").num_rows == 0


def test_no_name_leads_out_of_the_folder(tmp_path: Path):
    names = ["../../etc", "..", ".", "a/b", "a%2Fb", "a b", "\x00", "数学", "c:\\d"]
    folders = {result_folder(tmp_path, name, 0, "..", 0.6) for name in names}
    assert len(folders) == len(names)
    for folder in folders:
        assert folder.resolve().relative_to(tmp_path.resolve()).parts[1:] == ("step_0", "%2E%2E", "T0.6")
    assert safe_name("OlymMATH-EN-EASY") == "OlymMATH-EN-EASY"


RUNS = [
    result(["cw"] * 8 + ["ww"] * 8),
    result(["cc"] * 16, step=300),
    result(["ww"] * 8, benchmark="amc23"),
    result(["wc"] * 8, step=300, benchmark="amc23"),
]


def table_lines(text: str, title: str) -> list[str]:
    return text.split(f"## {title}\n\n")[1].split("\n\n")[0].splitlines()


def test_markdown_compares_runs_on_benchmarks():
    text = markdown(summarise(RUNS), "My runs")
    assert text.startswith("# My runs\n")
    assert "Baseline: grpo@0." in text
    assert table_lines(text, "pass@1") == [
        "| benchmark | grpo@0 | grpo@300 |",
        "| --- | ---: | ---: |",
        "| aime24 | 25.0 | 100.0 (+75.0 ▲) |",
        "| amc23 | 0.0 | 50.0 (+50.0 ▲) |",
        "| macro average | 12.5 | 75.0 (+62.5 ▲) |",
    ]
    assert table_lines(text, "pass@2")[2] == "| aime24 | 50.0 | 100.0 (+50.0 ▲) |"
    assert "| amc23 | grpo@0 | 0.0 [0.0, 32.4] | 0.0 [0.0, 32.4] |" in table_lines(text, "pass@k")
    # One of two answers is right: they tie.
    assert "| amc23 | grpo@300 | 50.0 [21.5, 78.5] |" in table_lines(text, "maj@k")
    assert "| aime24 | grpo@0 | 16 | 0 | 2 | 10.0 | 0.0 | 0.0 | 8 | 24 |" in table_lines(text, "Responses and verdicts")
    assert "Rank metrics" not in text
    assert "rm@" not in text and "maj@k: probability" in text
    scores = {(0, 0): 1.0, (0, 1): 0.0, (1, 0): 1.0, (1, 1): 0.0}
    scored = markdown(summarise([with_scores(result(["cw", "wc"]), scores)]))
    assert "rm@k: probability" in scored
    assert table_lines(scored, "rm@k")[2] == "| aime24 | grpo@0 | 50.0 [0.0, 100.0] |"
    assert table_lines(scored, "rm_maj@k")[2] == "| aime24 | grpo@0 | 50.0 [0.0, 100.0] |"
    measured = with_metrics(result(["cw"]), {"Effective Rank": [12.345678, 2.0]})
    lines = table_lines(markdown(summarise([measured])), "Rank metrics (means)")
    assert lines[2] == "| aime24 | grpo@0 | Effective Rank | 7.173 | 12.35 | 2 |"


def test_worse_and_within_the_noise():
    rows = [result(["c"] * 12), result(["w"] * 12, step=1), result(["w"] + ["c"] * 11, step=2)]
    table = comparison_table(summarise(rows), 1)
    # More runs than benchmarks: runs go down.
    assert (table.index.name, list(table)) == ("run", ["aime24"])
    assert table["aime24"].to_dict() == {"grpo@0": "100.0", "grpo@1": "0.0 (-100.0 ▼)", "grpo@2": "91.7 (-8.3)"}
    # A missing figure is a dash.
    summary = summarise([*RUNS, result(["", ""], run="late"), result(["c"], run="odd", benchmark="amc23")])
    assert comparison_table(summary, 2)[2:].to_numpy().tolist() == [["–", "–"], ["–", "–"]]
    assert "macro average" not in markdown(summary)


def test_csv_has_one_line_per_run_and_benchmark():
    lines = list(csv.DictReader(io.StringIO(csv_text(summarise(RUNS)))))
    assert [(line["benchmark"], line["run"]) for line in lines[:2]] == [("aime24", "grpo@0"), ("aime24", "grpo@300")]
    assert len(lines) == 6 and lines[-1]["benchmark"] == "macro average"
    first, second = lines[:2]
    assert (first["pass@1"], first["pass@2"], first["difference@1"], first["baseline"]) == ("0.25", "0.5", "", "")
    given = second["difference@1"], second["difference@1_outside_noise"], second["baseline"]
    assert given == ("0.75", "true", "grpo@0")
    assert (second["maj@2"], second["reason_correct"], second["mean_tokens"]) == ("1", "32", "10")


def test_hostile_names_stay_in_their_cells():
    summary = summarise([hostile_result("a|b\n# c\ud800")])
    text = markdown(summary)
    assert table_lines(text, "pass@1")[0] == "| benchmark | a\\|b # c\ufffd@0 |"
    assert table_lines(text, "pass@1")[2].startswith("| </script>bench\\|mark |")
    text.encode()
    assert len(list(csv.reader(io.StringIO(csv_text(summary))))) == 2
    assert printable("a\x1b[31m\u202eb\n") == "a [31m b "


def test_console_table_fits_80_columns():
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(terminal_table("", overview_table(summarise(RUNS))))
    # Markup in names is text.
    console.print(terminal_table("", overview_table(summarise([result(["c"], run="[red]x[/]")]))))
    lines = [" ".join(line.split()) for line in console.export_text().splitlines()]
    assert "aime24 grpo@300 100.0 (+75.0 ▲) 100.0 (+50.0 ▲) 100.0 10 0.0" in lines
    assert any(line.startswith("macro average grpo@0 12.5") for line in lines)
    assert any("[red]x[/]@0" in line for line in lines)


def test_the_same_results_give_the_same_files(tmp_path: Path):
    results = [*TWO_RUNS[:2], hostile_result()]
    summary = write_results(tmp_path / "a", results)
    assert [run for _, run in summary.table.index] == ["grpo@0", "grpo@300", "<b>grpo</b>@0"]
    write_results(tmp_path / "b", results)
    files = {path.relative_to(tmp_path / "a").as_posix() for path in (tmp_path / "a").rglob("*") if path.is_file()}
    assert files > {
        *("index.html", "results.md", "results.csv"),
        *("grpo/step_300/aime24/T1/samples.parquet", "grpo/step_300/aime24/T1/results.json"),
    }
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    figures = json.loads((tmp_path / "a/grpo/step_300/aime24/T1/results.json").read_text())["figures"]
    assert figures["pass@1"] == pytest.approx(8 / 12) and figures["Effective Rank/all"] is None
    assert figures["difference@1"] == pytest.approx(8 / 12 - 5 / 12) and figures["baseline"] == "grpo@0"
    write_results(tmp_path / "none", [])
    assert (tmp_path / "none" / "results.md").read_text() == "# Evaluation\n\nThere are no results.\n"
    assert (tmp_path / "none" / "results.csv").read_text() == "benchmark,run\n"
    assert (tmp_path / "none" / "index.html").is_file()


@pytest.mark.slow
def test_trackers_get_one_record_per_step_with_all_runs(tmp_path: Path, capsys):
    long = ProblemResult(1, "q", "7", [sample("c", num_tokens=13), sample("n")])
    results = [
        with_metrics(result(["cc", long], "a", 80, "sums"), {"ER": [2.0] * 4}),
        result(["ww", "cw"], "a", 0, "sums"),
        result(["wc", "cc"], "b", 80, "sums"),
        with_metrics(result(["cc", "cc"], "b", 80, "sums", 0.5), {"ER": [2.0] * 4}),
    ]
    (tmp_path / "metrics.jsonl").write_text("of an earlier evaluation\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "report.html").write_text("")
    targets = [
        Target("a", 80, "models/a", "abel", 128, folder=str(tmp_path / "run")),
        Target("b", 80, "hub/b", "chat", 64, folder=str(tmp_path / "gone")),
    ]
    config = evaluation_config("temperatures=[0,0.5]", "n_sampling=1", "top_p=0.9")
    publish(tmp_path, results, config, RunDisplay("", 0, {}), targets)
    sampling = "greedy, temperature 0.5, top_p 0.9, n=1, at most 128 or 64 tokens, template abel or chat"
    output = capsys.readouterr().out
    assert f"Evaluation (percent): {sampling}" in " ".join(output.split())
    about = f"Evaluated on {date.today()}: {sampling}. Models: a@80 is models/a, b@80 is hub/b."
    assert f"# embedded\n\n{about} [page of a](run/report.html)\n" in (tmp_path / "results.md").read_text()
    page = PageText((tmp_path / "index.html").read_text()).index
    assert page["legend"][0] == about and page["pages"] == [{"text": "Page of a", "href": "run/report.html"}]
    before, after = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert (before["step"], after["step"]) == (0, 80)
    assert (before["a/sums/pass@1"], before["a/sums/pass@2"]) == (0.25, 0.5)
    assert (after["a/sums/pass@1"], after["b T=1/sums/pass@1"], after["b T=0.5/sums/pass@1"]) == (0.75, 0.75, 1.0)
    assert after["a/sums/response_length/mean"] == 10.75 and after["a/sums/response_length/clip_ratio"] == 0.25
    assert after["a/sums/ER/correct/mean"] == 2.0 and "b T=0.5/sums/ER/wrong/mean" not in after
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["figures"]["a@80"]["sums"]["pass@2"] == 1.0 and "versions" in summary
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["model"]["template"] == "chat"
    assert "a@80" in output and f"page: {tmp_path}/index.html" in output.replace("\n", "")
