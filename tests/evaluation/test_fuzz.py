"""Hostile benchmarks and damaged records: one line that names the file, and nothing is lost."""

from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from tiny_tokenizer import make_tiny_tokenizer

from tests.conftest import changed
from tests.evaluation.example_tasks import evaluation_config
from tests.fuzzing import DAMAGE, VALUES, damaged, error_of, fuzz, json_lines
from verl.config.evaluation import EvaluationConfig
from verl.config.run_file import read_run_config
from verl.data.templates import render_prompt
from verl.evaluation.results import ProblemResult, ScoredSample, TaskResult, write_result
from verl.evaluation.scoring import StoredVerdict, verdict_settings
from verl.evaluation.statistics import summarise
from verl.evaluation.store import RecordFile, SampleStore, StoredSample
from verl.evaluation.targets import newest_run, select_targets
from verl.evaluation.tasks import load_problems
from verl.run.display import RunDisplay

TOKENIZER = make_tiny_tokenizer()
ROW: dict[str, Any] = {"question": "1 + 1?", "answer": "2"}
FIELDS = ("question", "answer", "options", "solution", "passage", "error", "choice_answer", "label", "target")
SETTINGS = {"seed": 0}
PROMPTS = [[1, 2], [3]]
SAMPLES = [StoredSample(i, j, f"response {i} \u2028", 2, False, {"rank": 1.5}) for i in range(2) for j in range(2)]
VERDICTS = [StoredVerdict(0, j, "digest", True, "2", "correct", {}) for j in range(3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@cache
def evaluation_of(folder: Path) -> EvaluationConfig:
    """Of a benchmark in ``folder``."""
    return evaluation_config("benchmarks=[mine]", f"data.benchmark_dir={folder}", "model.path=unused")


def check_benchmark(folder: Path, content: bytes) -> None:
    """Everything that an evaluation does with a benchmark but for the model."""
    path = folder / "mine.jsonl"
    path.write_bytes(content)
    config = evaluation_of(folder)

    def read() -> None:
        problems = load_problems("mine", config)
        for problem in problems:
            render_prompt("plain-boxed", problem.question, TOKENIZER)
        verdict_settings(problems, config.reward_score)
        sample = ScoredSample("response", 1, False, False, "", "wrong")
        found = [ProblemResult(problem.index, problem.question, problem.answer, [sample]) for problem in problems]
        result = TaskResult("run", 0, "mine", 0.6, found)
        write_result(folder, result, {})
        summarise([result])

    error_of(read, "mine")


@fuzz(25, fields=st.dictionaries(st.sampled_from(FIELDS), VALUES, min_size=1, max_size=3))
def benchmark_rows(folder: Path, fields: dict[str, Any]):
    check_benchmark(folder, json_lines([ROW, ROW | fields]))


@fuzz(25, damage=DAMAGE)
def benchmark_files(folder: Path, damage: list):
    check_benchmark(folder, damaged(json_lines([ROW, ROW | {"options": ["1", "2"]}, ROW]), damage))


@fuzz(40, damage=DAMAGE, name=st.sampled_from(["samples.jsonl", "generation.json"]))
def samples(folder: Path, damage: list, name: str):
    for path in folder.glob("store/*"):
        path.unlink()
    with SampleStore(folder / "store", SETTINGS, PROMPTS) as store:
        store.append(SAMPLES)
    path = folder / "store" / name
    content = damaged(path.read_bytes(), damage)
    path.write_bytes(content)

    def read() -> None:
        with SampleStore(folder / "store", SETTINGS, PROMPTS) as store:
            assert all(isinstance(sample.response, str) for sample in store.samples.values())
            assert len(store.missing(2)) <= 4

    # A line that was cut at the end is what a kill leaves; no other byte is touched.
    error_of(read, folder / "store")
    assert content.startswith(path.read_bytes())


@fuzz(40, damage=DAMAGE)
def verdicts(folder: Path, damage: list):
    path = folder / "verdicts.jsonl"
    path.write_bytes(damaged(json_lines([SETTINGS, *map(asdict, VERDICTS)]), damage))

    def read() -> None:
        with RecordFile(path, StoredVerdict, SETTINGS) as file:
            assert all(type(verdict.correct) is bool for verdict in file.records)

    error_of(read, path)


CONFIG = b"model: {path: base, override_config: {}}\ntrainer:\n  experiment_name: mine\n  resume_from_path: null\n"


@fuzz(12, damage=DAMAGE)
def run_configs(folder: Path, damage: list):
    run = folder / "runs" / "run"
    (run / "global_step_2").mkdir(parents=True, exist_ok=True)
    (run / "latest_checkpointed_iteration.txt").write_bytes(damaged(b"2\n", damage))
    (run / "config.yaml").write_bytes(damaged(CONFIG, damage))
    error_of(lambda: read_run_config(run / "config.yaml"), run / "config.yaml")
    assert newest_run(folder / "runs", "some/model") is None
    # The run has no model to evaluate, whatever its options say.
    display = RunDisplay("", 0, {})
    select_targets(changed(evaluation_of(folder), model={"path": str(run), "steps": [0, 2]}), display)
    assert all(len(line.splitlines()) == 1 for line in display.errors) and len(display.errors) >= 1


test_benchmark_rows, test_many_benchmark_rows = benchmark_rows
test_benchmark_files, test_many_benchmark_files = benchmark_files
test_samples, test_many_samples = samples
test_verdicts, test_many_verdicts = verdicts
test_run_configs, test_many_run_configs = run_configs
