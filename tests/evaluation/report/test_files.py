import json
from pathlib import Path

from tests.evaluation.example_results import hostile_result, result
from verl.evaluation.report.files import write_results
from verl.evaluation.results import read_result


def test_everything_is_written_and_written_alike(tmp_path: Path):
    results = [result(["cw", "ww"]), result(["cc", "cw"], step=300), hostile_result()]
    summary = write_results(tmp_path / "a", results)
    assert [row.label for row in summary.rows] == ["grpo@0", "grpo@300", "<b>grpo</b>@0"]
    write_results(tmp_path / "b", results)
    files = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*") if path.is_file())
    names = [path.as_posix() for path in files]
    for name in ("index.html", "results.md", "results.csv", "plots/pass_at_k_aime24.png"):
        assert name in names
    assert "grpo/step_300/aime24/T1/samples.parquet" in names
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_figures_stand_in_the_json(tmp_path: Path):
    results = [result(["cw", "ww"]), result(["cc", "cw"], step=300)]
    write_results(tmp_path, results)
    folder = tmp_path / "grpo" / "step_300" / "aime24" / "T1"
    figures = json.loads((folder / "results.json").read_text())["figures"]
    assert figures["pass_at_k"]["1"]["value"] == 0.75
    assert figures["differences"]["1"]["estimate"]["value"] == 0.5
    assert figures["baseline"] == "grpo@0"
    assert read_result(folder) == results[1]


def test_nothing_to_report(tmp_path: Path):
    write_results(tmp_path, [])
    assert (tmp_path / "results.md").read_text() == "# Evaluation\n\nThere are no results.\n"
    assert (tmp_path / "index.html").is_file()
