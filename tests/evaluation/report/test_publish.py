"""What trackers are told."""

import json
from pathlib import Path

import yaml

from tests.evaluation.example_tasks import evaluation_config
from verl.evaluation.progress import EvaluationDisplay
from verl.evaluation.report.publish import publish
from verl.evaluation.results import ProblemResult, ScoredSample, TaskResult


def result(run: str, step: int, correct: list[list[bool]], temperature: float = 1.0) -> TaskResult:
    problems = [
        ProblemResult(
            index,
            f"question {index}",
            "4",
            [
                ScoredSample(
                    "r", 10 + good, not good, good, "4" if good else "5", "correct" if good else "wrong", {"ER": 2.0}
                )
                for good in row
            ],
        )
        for index, row in enumerate(correct)
    ]
    return TaskResult(run, step, "sums", temperature, problems)


RESULTS = [
    result("a", 80, [[True, True], [True, False]]),
    result("a", 0, [[False, False], [True, False]]),
    result("b", 80, [[False, True], [True, True]]),
    result("b", 80, [[True, True], [True, True]], temperature=0.5),
]


def test_one_record_for_each_step_with_all_runs_in_it(tmp_path: Path, capsys):
    (tmp_path / "metrics.jsonl").write_text("of an earlier evaluation\n")
    publish(tmp_path, RESULTS, evaluation_config(), EvaluationDisplay())
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [0, 80]
    before, after = records
    assert (before["a/sums/pass@1"], before["a/sums/pass@2"]) == (0.25, 0.5)
    assert (after["a/sums/pass@1"], after["b T=1/sums/pass@1"], after["b T=0.5/sums/pass@1"]) == (0.75, 0.75, 1.0)
    assert after["a/sums/response_length/mean"] == 10.75 and after["a/sums/response_length/clip_ratio"] == 0.25
    assert after["a/sums/ER/correct/mean"] == 2.0 and "b T=0.5/sums/ER/wrong/mean" not in after
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["figures"]["a@80"]["sums"]["pass@2"] == 1.0 and "versions" in summary
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["model"]["template"] == "chat"
    output = capsys.readouterr().out
    assert "a@80" in output and f"page: {tmp_path}/index.html" in output.replace("\n", "")
