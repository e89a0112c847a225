import csv
import io

import pytest
from rich.console import Console

from tests.evaluation.example_results import hostile_result, result, with_metrics
from verl.evaluation.report.tables import comparison_table, console_table, csv_text, markdown
from verl.evaluation.statistics.summary import summarise
from verl.utils.portable import printable

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
    assert "| amc23 | grpo@0 | 0.0 [0.0, 0.0] | 0.0 [0.0, 0.0] |" in table_lines(text, "pass@k")
    # One of two answers is right: they tie.
    assert "| amc23 | grpo@300 | 50.0 [50.0, 50.0] |" in table_lines(text, "maj@k")
    assert "| aime24 | grpo@0 | 16 | 0 | 2 | 10.0 | 0.0 | 0.0 | 8 | 24 |" in table_lines(text, "Responses and verdicts")
    assert "Rank metrics" not in text
    measured = with_metrics(result(["cw"]), {"Effective Rank": [12.345678, 2.0]})
    lines = table_lines(markdown(summarise([measured])), "Rank metrics (means)")
    assert lines[2] == "| aime24 | grpo@0 | Effective Rank | 7.173 | 12.35 | 2 |"


def test_worse_and_within_the_noise():
    rows = [result(["c"] * 12), result(["w"] * 12, step=1), result(["w"] + ["c"] * 11, step=2)]
    table = comparison_table(summarise(rows), 1)
    # More runs than benchmarks: runs go down.
    assert table.headers == ["run", "aime24"]
    assert table.rows == [["grpo@0", "100.0"], ["grpo@1", "0.0 (-100.0 ▼)"], ["grpo@2", "91.7 (-8.3)"]]
    # A missing figure is a dash.
    summary = summarise([*RUNS, result(["", ""], run="late"), result(["c"], run="odd", benchmark="amc23")])
    assert comparison_table(summary, 2).rows[2:] == [["late@0", "–", "–"], ["odd@0", "–", "–"]]
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
    assert table_lines(text, "pass@1")[0] == "| benchmark | a\\|b # c @0 |"
    assert table_lines(text, "pass@1")[2].startswith("| </script>bench\\|mark |")
    text.encode()
    assert len(list(csv.reader(io.StringIO(csv_text(summary))))) == 2
    assert printable("a\x1b[31m\u202eb\n") == "a [31m b "


@pytest.mark.parametrize("width", [80, 120])
def test_console_table(width: int):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(console_table(summarise(RUNS)))
    # Markup in names is text.
    console.print(console_table(summarise([result(["c"], run="[red]x[/]")])))
    words = [line.split() for line in console.export_text().splitlines()]
    assert ["grpo@300", "100.0", "+75.0", "▲", "100.0", "+50.0", "▲", "100.0", "10", "0.0"] in words
    assert any(line[:2] == ["average", "grpo@0"] for line in words) and any("[red]x[/]@0" in line for line in words)
