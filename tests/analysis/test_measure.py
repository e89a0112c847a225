"""Files of prompts in veRL's layout, and measurements of responses on disk."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT

from tests.analysis.example_tables import analysis_config
from tests.kit import refused
from tests.tables import cases, refusals
from verl.analysis.analyse import read_prompt_file
from verl.analysis.measure import MeasureFile, prompts_of
from verl.data.records import RL_SCHEMA, rl_record, write_parquet
from verl.evaluation.store import SampleStore, StoredSample
from verl.workers.measurements import MeasuredPrompt, PrefixMetrics, PromptResponses

PROMPT = PromptResponses(0, [1, 2], [[5, 6], [7]])
MEASURED = MeasuredPrompt(0, [{"a": [1.0]}, {"a": [2.0]}], {"a": [3.0]}, {"d": 0.5}, [PrefixMetrics([2], {"a": [1.0]})])


def test_prompts_that_were_not_answered_are_left_out(tmp_path: Path):
    task = SimpleNamespace(prompts=[[1, 2], [3] * 9, [4]])
    with SampleStore(tmp_path, {}, task.prompts, unanswered={1}) as store:
        ids = {(0, 0): [5, 6], (0, 1): [7], (2, 0): [8], (2, 1): [9]}
        store.append([StoredSample(i, j, "", len(row), False, {}, row) for (i, j), row in ids.items()])
        assert prompts_of(task, store, 2) == [PROMPT, PromptResponses(2, [4], [[8], [9]])]


def test_measurements_are_reused_for_equal_settings(tmp_path: Path):
    with MeasureFile(tmp_path, {"stride": 8}) as file:
        assert file.get(PROMPT) is None
        file.append(PROMPT, MEASURED)
    with MeasureFile(tmp_path, {"stride": 8}) as file:
        assert file.get(PROMPT) == MEASURED
        assert file.get(PromptResponses(0, [1, 2], [[5, 6], [8]])) is None
    with MeasureFile(tmp_path, {"stride": 4}) as file:
        assert file.get(PROMPT) is None


@pytest.mark.parametrize(("line",), cases("analysis/refusals.txt", "lines"))
def test_a_damaged_line_is_named(tmp_path: Path, line: str):
    MeasureFile(tmp_path, {}).__exit__()
    with (tmp_path / "measures.jsonl").open("a") as file:
        file.write(f"{line}\n")
    with refused(
        "TMP/measures.jsonl, line 2 is damaged; remove that line and run the same command again", TMP=tmp_path
    ):
        MeasureFile(tmp_path, {})


RECORD = rl_record(data_source="arithmetic", question="What is 2 + 3?", ground_truth="5", split="test", index=0)


def test_the_embedded_prompts():
    name, problems = read_prompt_file(
        str(ROOT / "data" / "arithmetic" / "test.parquet"), analysis_config("data.max_problems=3")
    )
    assert (name, len(problems), [problem.index for problem in problems]) == ("test", 3, [0, 1, 2])
    assert (problems[0].question, problems[0].answer) == ("What is 9511 - 1506?", "8005")
    assert problems[0].data_source == "arithmetic"


@pytest.mark.parametrize(("change", "line"), refusals("analysis/refusals.txt", "prompts"))
def test_invalid_prompts_are_named(change: str, line: str, tmp_path: Path):
    path = tmp_path / "a.parquet"
    write_parquet(path, [RECORD, RECORD | eval(change)], RL_SCHEMA)
    with refused(line, TMP=tmp_path):
        read_prompt_file(str(path), analysis_config())
    assert read_prompt_file(str(path), analysis_config("data.max_problems=1"))[1][0].question == "What is 2 + 3?"
