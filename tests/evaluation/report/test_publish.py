"""The files that an evaluation leaves behind, and what trackers are told."""

import json
from pathlib import Path

import pytest
import yaml

from tests.evaluation.example_results import TWO_RUNS, hostile_result, result, sample, with_metrics
from tests.evaluation.example_tasks import evaluation_config
from verl.evaluation.progress import EvaluationDisplay
from verl.evaluation.report.publish import publish, write_results
from verl.evaluation.results import ProblemResult

pytestmark = pytest.mark.slow


def test_the_same_results_give_the_same_files(tmp_path: Path):
    results = [*TWO_RUNS[:2], hostile_result()]
    summary = write_results(tmp_path / "a", results)
    assert [row.label for row in summary.rows] == ["grpo@0", "grpo@300", "<b>grpo</b>@0"]
    write_results(tmp_path / "b", results)
    files = {path.relative_to(tmp_path / "a").as_posix() for path in (tmp_path / "a").rglob("*") if path.is_file()}
    assert files > {
        *("index.html", "results.md", "results.csv", "plots/pass_at_k_aime24.png"),
        *("grpo/step_300/aime24/T1/samples.parquet", "grpo/step_300/aime24/T1/results.json"),
    }
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    figures = json.loads((tmp_path / "a/grpo/step_300/aime24/T1/results.json").read_text())["figures"]
    assert figures["pass_at_k"]["1"]["value"] == pytest.approx(8 / 12)
    assert figures["differences"]["1"]["estimate"]["value"] == pytest.approx(8 / 12 - 5 / 12)
    assert figures["baseline"] == "grpo@0" and not {"label", "benchmark"} & figures.keys()
    write_results(tmp_path / "none", [])
    assert (tmp_path / "none" / "results.md").read_text() == "# Evaluation\n\nThere are no results.\n"
    assert (tmp_path / "none" / "results.csv").read_text() == "benchmark,run\n"
    assert (tmp_path / "none" / "index.html").is_file()


def test_trackers_get_one_record_per_step_with_all_runs(tmp_path: Path, capsys):
    long = ProblemResult(1, "q", "7", [sample("c", num_tokens=13), sample("n")])
    results = [
        with_metrics(result(["cc", long], "a", 80, "sums"), {"ER": [2.0] * 4}),
        result(["ww", "cw"], "a", 0, "sums"),
        result(["wc", "cc"], "b", 80, "sums"),
        with_metrics(result(["cc", "cc"], "b", 80, "sums", 0.5), {"ER": [2.0] * 4}),
    ]
    (tmp_path / "metrics.jsonl").write_text("of an earlier evaluation\n")
    publish(tmp_path, results, evaluation_config(), EvaluationDisplay())
    before, after = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert (before["step"], after["step"]) == (0, 80)
    assert (before["a/sums/pass@1"], before["a/sums/pass@2"]) == (0.25, 0.5)
    assert (after["a/sums/pass@1"], after["b T=1/sums/pass@1"], after["b T=0.5/sums/pass@1"]) == (0.75, 0.75, 1.0)
    assert after["a/sums/response_length/mean"] == 10.75 and after["a/sums/response_length/clip_ratio"] == 0.25
    assert after["a/sums/ER/correct/mean"] == 2.0 and "b T=0.5/sums/ER/wrong/mean" not in after
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["figures"]["a@80"]["sums"]["pass@2"] == 1.0 and "versions" in summary
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["model"]["template"] == "chat"
    output = capsys.readouterr().out
    assert "a@80" in output and f"page: {tmp_path}/index.html" in output.replace("\n", "")
