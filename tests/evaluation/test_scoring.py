"""Verdicts: made once, made again when what they depend on changes, and never by generating."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.evaluation.example_tasks import evaluation_config, make_task
from verl.config import ConfigError
from verl.evaluation import scoring
from verl.evaluation.results import REASONS, TaskResult, sample_table
from verl.evaluation.scoring import reason_code, score_samples, verdict_settings
from verl.evaluation.store import StoredSample
from verl.evaluation.tasks import EvaluationTask
from verl.rewards.custom import CustomFunctionError
from verl.rewards.score import with_score
from verl.verifiers.verdict import Verdict

CONFIG = evaluation_config().reward_score
RESPONSES = [["it is \\boxed{4}", "it is \\boxed{5}"], ["no idea", "9"]]
SAMPLES = {
    (i, j): StoredSample(i, j, text, 10 + j, j == 1, {"Effective Rank": 2.0})
    for i, texts in enumerate(RESPONSES)
    for j, text in enumerate(texts)
}


class CountingPool:
    """Scores in this process, and counts the responses it was given."""

    def __init__(self, error: Exception | None = None, **changes: Any) -> None:
        self.config = replace(CONFIG, **changes)
        self.error = error
        self.asked = 0
        self.extras: dict[str, Any] = {}

    def score_batch(
        self, sources: list[str], solutions: list[str], truths: list[str], infos: list[Any], in_thought: list[bool]
    ) -> list[Verdict]:
        self.in_thought = in_thought
        if self.error:
            raise self.error
        self.asked += len(solutions)
        return [self.score(text, truth) for text, truth in zip(solutions, truths, strict=True)]

    def score(self, text: str, truth: str) -> Verdict:
        boxed = "boxed" in text
        reason = "exact" if truth in text else "different" if boxed else "missing"
        extras = self.extras if text == "no idea" else {}
        return Verdict(truth in text, boxed, reason, text[-9:], 0.0, extras)


@pytest.fixture
def task(tmp_path: Path) -> Iterator[EvaluationTask]:
    made = make_task(tmp_path, ["4", "9"])
    with made.open_store():
        yield made


@pytest.fixture
def score(task: EvaluationTask) -> Callable[..., tuple[TaskResult, int]]:
    """Scores the task with a pool; the result, and how many responses were scored."""

    def run(n: int = 2, pool: CountingPool | None = None, **changes: Any) -> tuple[TaskResult, int]:
        pool = pool or CountingPool()
        before = pool.asked
        found = score_samples(changes.get("task", task), changes.get("samples", SAMPLES), n, pool)
        return found, pool.asked - before

    return run


def verdict_lines(task: EvaluationTask) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (task.folder / "verdicts.jsonl").read_text().split("\n")[:-1]]


def correct(result: TaskResult) -> list[bool]:
    return [sample.correct for problem in result.problems for sample in problem.samples]


def test_samples_and_verdicts_become_a_result(score):
    result, _ = score()
    assert (result.run, result.step, result.benchmark, result.temperature) == ("run", 80, "sums", 0.6)
    assert [(p.index, p.question, p.answer) for p in result.problems] == [
        (0, "question 0", "4"),
        (1, "question 1", "9"),
    ]
    found = [(s.response, s.correct, s.reason, s.num_tokens, s.truncated) for p in result.problems for s in p.samples]
    assert found == [
        ("it is \\boxed{4}", True, "correct", 10, False),
        ("it is \\boxed{5}", False, "wrong", 11, True),
        ("no idea", False, "no_answer", 10, False),
        ("9", True, "correct", 11, True),
    ]
    assert result.problems[0].samples[0].metrics == {"Effective Rank": 2.0}


def test_programs_run_before_their_answers_are_verified(task, score, monkeypatch):
    monkeypatch.setattr(scoring, "with_solutions", lambda texts: [f"{text} returns 4" for text in texts])
    result, _ = score(task=replace(task, target=replace(task.target, template="pal")))
    assert correct(result) == [True, True, False, True]
    # What is kept is what the model said.
    assert result.problems[0].samples[0].response == "it is \\boxed{4}"

    def broken(texts: list[str]) -> list[str]:
        raise RuntimeError("bubblewrap: no sandbox")

    monkeypatch.setattr(scoring, "with_solutions", broken)
    (task.folder / "verdicts.jsonl").unlink()
    with pytest.raises(ConfigError, match="^sums: cannot be scored: bubblewrap: no sandbox"):
        score(task=replace(task, target=replace(task.target, template="pal")))


def test_verdicts_are_kept_and_a_killed_scoring_resumes(task, score):
    first, asked = score(1)
    assert asked == 2 and [len(problem.samples) for problem in first.problems] == [1, 1]
    path = task.folder / "verdicts.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    whole, asked = score(2)
    assert asked == 3
    keys = [(line["problem"], line["sample"]) for line in verdict_lines(task)[1:]]
    assert sorted(keys) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert score() == (whole, 0) and score(1) == (first, 0)
    text = path.read_text()
    for line in ('{"problem": 0}', text.splitlines()[-1].replace('"reason": "', '"reason": "un')):
        path.write_text(f"{text}{line}\n")
        with pytest.raises(ConfigError, match=r"verdicts\.jsonl, line 6 is damaged; remove that line"):
            score()


def test_custom_function_extras_are_kept_with_the_sample(score):
    pool = CountingPool()
    pool.extras = {"chars": 7, "parts": ["\ud800", None], "loss": math.nan}
    for result in (score(pool=pool)[0], score(pool=pool)[0]):  # scored, and read from the file
        kept = [sample.extras for problem in result.problems for sample in problem.samples]
        assert repr(kept) == r"[{}, {}, {'chars': 7, 'parts': ['\ud800', None], 'loss': nan}, {}]"
    rows = sample_table(result).to_pylist()
    in_table = r'{"chars": 7, "parts": ["\ud800", null], "loss": null}'
    assert [row["reward_extra_info"] for row in rows] == [None, None, in_table, None]


def test_other_limits_answers_or_libraries_score_again(task, score, monkeypatch: pytest.MonkeyPatch):
    score()
    assert score(pool=CountingPool(timeout_s=1.0))[1] == 4 and len(verdict_lines(task)) == 5
    changed = replace(task, problems=[task.problems[0], replace(task.problems[1], answer="5")])
    result, asked = score(task=changed)
    assert (correct(result), asked) == ([True, False, False, False], 4)
    monkeypatch.setattr("verl.evaluation.scoring.version", lambda name: "99")
    assert score()[1] == 4
    assert verdict_lines(task)[0]["libraries"] == {"math-verify": "99", "latex2sympy2_extended": "99", "sympy": "99"}


@pytest.mark.parametrize("path", ["{folder}/rewards_that_change.py:one", "rewards_that_change:one"])
def test_verdicts_depend_on_a_custom_function(path: str, task, monkeypatch, tmp_path: Path):
    before = verdict_settings(task.problems, CONFIG)
    assert verdict_settings(task.problems, replace(CONFIG, num_workers=7)) == before
    (tmp_path / "rewards_that_change.py").write_text("def one(**_): return 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    custom = replace(CONFIG, custom_functions=[f"sums={path.format(folder=tmp_path)}"])
    changed = verdict_settings(task.problems, custom)
    (tmp_path / "rewards_that_change.py").write_text("def one(**_): return 0\n")
    assert verdict_settings(task.problems, custom) != changed != before


def test_verdicts_depend_on_what_is_judged(task):
    model = replace(CONFIG.judge.model, name="m")
    judge = replace(CONFIG.judge, enable=True, base_url="http://127.0.0.1:9/v1", model=model)
    found = [
        verdict_settings(task.problems, replace(CONFIG, judge=replace(judge, data_sources=sources)))
        for sources in ([], ["sums"], ["others"])
    ]
    assert found[0] != found[1] != found[2]


def test_a_response_that_was_generated_again_is_scored_again(score):
    score()
    samples = SAMPLES | {(0, 0): replace(SAMPLES[0, 0], response="now it is \\boxed{7}")}
    result, asked = score(samples=samples)
    assert (correct(result), asked) == ([False, False, False, True], 1)
    again, asked = score(samples=samples)
    assert again.problems[0].samples[0].answer == "\\boxed{7}" and asked == 0


@pytest.mark.parametrize("kind", [CustomFunctionError, ValueError, RuntimeError])
def test_a_verifier_that_fails_names_the_benchmark(score, kind: type[Exception]):
    error = kind("reward_score.num_workers=2: verifier processes stopped 3 times")
    with pytest.raises(ConfigError, match=f"^sums: cannot be scored: {error}"):
        score(pool=CountingPool(error))


def test_reason_codes():
    right = [reason_code(with_score(Verdict(True, False, reason), "mix")) for reason in ("exact", "custom")]
    reasons = ("different", "custom", "missing", "unparsed", "timeout", "memory", "crash")
    wrong = [reason_code(with_score(Verdict(False, False, reason), "mix")) for reason in reasons]
    assert (right, wrong) == (["correct"] * 2, ["wrong", "wrong", "no_answer", *reasons[3:]])
    assert set(wrong) < set(REASONS)
