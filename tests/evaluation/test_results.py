import json
import math
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.evaluation.example_results import HOSTILE, hostile_result, problem, result, with_metrics
from verl.evaluation.results import result_folder, row_labels, safe_name, write_result


def test_labels_name_the_temperature_only_if_needed():
    assert row_labels([result(["c"]), result(["w"], step=300)]) == ["grpo@0", "grpo@300"]
    # Each benchmark has its own temperature: the benchmark distinguishes them.
    assert row_labels([result(["c"]), result(["w"], benchmark="gsm8k", temperature=0.0)]) == ["grpo@0", "grpo@0"]
    both = [result(["c"]), result(["c"], temperature=0.6), result(["c"], step=5)]
    assert row_labels(both) == ["grpo@0 T=1", "grpo@0 T=0.6", "grpo@5"]
    with pytest.raises(ValueError, match="grpo@0 has two results on aime24 at temperature 1"):
        row_labels([result(["c"]), result(["w"])])


def test_files_of_a_result(tmp_path: Path):
    metrics = {"Effective Rank": [1.5, math.inf], "Curvature": [0.1, 0.2]}
    (measured,) = with_metrics(result(["cw"]), metrics).problems
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
    assert rows[0] == given | verdict | {"metric/Effective Rank": 1.5, "metric/Curvature": 0.1}
    assert list(rows[0])[:2] == ["problem", "sample"]
    found = [(row["problem"], row["sample"], row["reason"], row["metric/Effective Rank"]) for row in rows[1:]]
    # A sample without a metric has null.
    assert found == [(0, 1, "wrong", math.inf), (2, 0, "no_answer", None)]


def test_hostile_text_and_no_problems_are_written(tmp_path: Path):
    folder = write_result(tmp_path, hostile_result())
    # UTF-8 cannot represent lone surrogates.
    expected = list((HOSTILE | {"surrogates": "lone \ufffd and \ufffd, pair \U0001f600"}).values())
    rows = pq.read_table(folder / "samples.parquet").to_pylist()
    assert [(row["response"], row["answer"]) for row in rows[::2]] == [(text, text) for text in expected]
    problems = json.loads((folder / "results.json").read_text())["problems"]
    assert [(p["question"], p["answer"]) for p in problems] == [(text, text) for text in HOSTILE.values()]
    folder = write_result(tmp_path, result([]))
    assert json.loads((folder / "results.json").read_text())["problems"] == []
    assert pq.read_table(folder / "samples.parquet").num_rows == 0


def test_no_name_leads_out_of_the_folder(tmp_path: Path):
    names = ["../../etc", "..", ".", "a/b", "a%2Fb", "a b", "\x00", "数学", "c:\\d"]
    folders = {result_folder(tmp_path, name, 0, "..", 0.6) for name in names}
    assert len(folders) == len(names)
    for folder in folders:
        assert folder.resolve().relative_to(tmp_path.resolve()).parts[1:] == ("step_0", "%2E%2E", "T0.6")
    assert safe_name("OlymMATH-EN-EASY") == "OlymMATH-EN-EASY"
