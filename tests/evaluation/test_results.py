import json
import math
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.evaluation.example_results import HOSTILE, hostile_result, result, with_metrics
from verl.evaluation.results import (
    TaskResult,
    read_result,
    replacing,
    result_folder,
    row_labels,
    safe_name,
    write_result,
)


def test_labels_name_the_temperature_only_where_needed():
    assert row_labels([result(["c"]), result(["w"], step=300)]) == ["grpo@0", "grpo@300"]
    # Two benchmarks at a temperature each: the benchmark tells them apart.
    assert row_labels([result(["c"]), result(["w"], benchmark="gsm8k", temperature=0.0)]) == ["grpo@0", "grpo@0"]
    both = [result(["c"]), result(["c"], temperature=0.6), result(["c"], step=5)]
    assert row_labels(both) == ["grpo@0 T=1", "grpo@0 T=0.6", "grpo@5"]


def test_a_result_stands_once_in_a_list():
    with pytest.raises(ValueError, match="grpo@0 has two results on aime24 at temperature 1"):
        row_labels([result(["c"]), result(["w"])])


def test_a_result_is_read_as_it_was_written(tmp_path: Path):
    written = with_metrics(
        result(["cw", "", "n"]), {"Effective Rank": [1.5, math.inf, 2.5], "Effective Rank diff": [0.1, 0.2, -0.3]}
    )
    folder = write_result(tmp_path, written, {"pass@1": 0.25, "undefined": math.nan})
    assert folder == tmp_path / "grpo" / "step_0" / "aime24" / "T1"
    assert read_result(folder) == written
    record = json.loads((folder / "results.json").read_text())
    assert record["figures"] == {"pass@1": 0.25, "undefined": None}
    assert [(p["samples"], p["correct"]) for p in record["problems"]] == [(2, 1), (0, 0), (1, 0)]
    assert pq.read_table(folder / "samples.parquet").column_names[:2] == ["problem", "sample"]


def test_a_metric_that_a_sample_lacks_stays_absent(tmp_path: Path):
    first = with_metrics(result(["c"]), {"Effective Rank": [1.0]})
    bare = result(["cw"])
    mixed = TaskResult(
        "grpo", 0, "aime24", 1.0, [first.problems[0], *bare.problems[1:], *result(["", "w"]).problems[1:]]
    )
    assert read_result(write_result(tmp_path, mixed)) == mixed


def test_hostile_text_survives(tmp_path: Path):
    written = hostile_result()
    read = read_result(write_result(tmp_path, written))
    for before, after in zip(written.problems, read.problems, strict=True):
        assert after.question == before.question
        if before.question != HOSTILE["surrogates"]:
            assert after.samples == before.samples
    at = list(HOSTILE).index("surrogates")
    # UTF-8 has no lone surrogates.
    assert read.problems[at].samples[0].response == "lone \ufffd and \ufffd, pair \U0001f600"


def test_an_empty_result(tmp_path: Path):
    empty = result([])
    assert read_result(write_result(tmp_path, empty)) == empty


def test_no_name_leads_out_of_the_folder(tmp_path: Path):
    names = ["../../etc", "..", ".", "a/b", "a%2Fb", "a b", "\x00", "数学", "c:\\d"]
    folders = {result_folder(tmp_path, name, 0, "..", 0.6) for name in names}
    assert len(folders) == len(names)
    for folder in folders:
        assert folder.resolve().relative_to(tmp_path.resolve()).parts[1:] == ("step_0", "%2E%2E", "T0.6")
    assert safe_name("OlymMATH-EN-EASY") == "OlymMATH-EN-EASY"


def test_an_error_leaves_the_old_file(tmp_path: Path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(OSError, match="disk full"), replacing(path) as temporary:
        temporary.write_text("half")
        raise OSError("disk full")
    assert [p.name for p in tmp_path.iterdir()] == ["file"] and path.read_text() == "old"
