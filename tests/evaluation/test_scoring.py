"""Verdicts: made once, made anew when what they depend on changes, and never by generating."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.evaluation.fakes import evaluation_config
from verl.config import ConfigError
from verl.evaluation.benchmarks import Problem
from verl.evaluation.generation import Work
from verl.evaluation.jobs import Job
from verl.evaluation.results import REASONS
from verl.evaluation.scoring import reason_code, score, verdict_settings
from verl.evaluation.store import StoredSample
from verl.evaluation.targets import Target
from verl.rewards import Score
from verl.rewards.custom import CustomFunctionError
from verl.rewards.pool import VerifierPool

CONFIG = evaluation_config().reward_score
RESPONSES = [["it is \\boxed{4}", "it is \\boxed{5}"], ["no idea", "9"]]
ANSWERS = ["4", "9"]


class CountingPool:
    """Judges in this process, and counts the responses it was asked about."""

    def __init__(self, error: Exception | None = None, **changes: Any) -> None:
        self.config = replace(CONFIG, **changes)
        self.error = error
        self.asked = 0

    def score_batch(self, sources: list[str], solutions: list[str], truths: list[str], infos: list[Any]) -> list[Score]:
        if self.error:
            raise self.error
        self.asked += len(solutions)
        return [
            Score(
                score=0.0,
                correctness=truth in text,
                boxed="boxed" in text,
                reason="exact" if truth in text else "different" if "boxed" in text else "missing",
                answer=text[-9:],
            )
            for text, truth in zip(solutions, truths, strict=True)
        ]


def make_work(folder: Path, answers: list[str] = ANSWERS) -> Work:
    job = Job(
        target=Target("run", 80, "model", "chat", 8),
        benchmark="sums",
        temperature=1.0,
        problems=[Problem(i, f"question {i}", answer, "arithmetic", {}, None) for i, answer in enumerate(answers)],
        prompts=[[i] for i in range(len(answers))],
        folder=folder,
        settings={},
    )
    return Work(job, job.open_store())


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Work]:
    made = make_work(tmp_path)
    made.store.append(
        [
            StoredSample(i, j, text, 10 + j, j == 1, {"Effective Rank": 2.0})
            for i, texts in enumerate(RESPONSES)
            for j, text in enumerate(texts)
        ]
    )
    yield made
    made.store.__exit__()


def verdict_lines(work: Work) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (work.store.folder / "verdicts.jsonl").read_text().split("\n")[:-1]]


def test_samples_and_verdicts_become_a_result(work: Work):
    result = score(work, 2, CountingPool())
    assert (result.run, result.step, result.benchmark, result.temperature) == ("run", 80, "sums", 1.0)
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


def test_verdicts_are_kept_and_fewer_samples_need_none(work: Work):
    first, second = CountingPool(), CountingPool()
    whole = score(work, 2, first)
    assert score(work, 2, second) == whole
    assert (first.asked, second.asked) == (4, 0)
    assert [len(problem.samples) for problem in score(work, 1, second).problems] == [1, 1]
    assert second.asked == 0


def test_a_scoring_that_was_killed_goes_on(work: Work):
    score(work, 1, CountingPool())
    path = work.store.folder / "verdicts.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    pool = CountingPool()
    score(work, 2, pool)
    assert pool.asked == 3
    keys = [(line["problem"], line["sample"]) for line in verdict_lines(work)[1:]]
    assert sorted(keys) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_other_limits_answers_or_verifiers_score_again(work: Work, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    score(work, 2, CountingPool())
    pool = CountingPool(timeout_s=1.0)
    score(work, 2, pool)
    assert pool.asked == 4 and len(verdict_lines(work)) == 5
    changed = replace(
        work, job=replace(work.job, problems=[work.job.problems[0], replace(work.job.problems[1], answer="5")])
    )
    assert [s.correct for p in score(changed, 2, pool).problems for s in p.samples] == [True, False, False, False]
    assert pool.asked == 8
    # The number of processes changes nothing.
    before = verdict_settings(work.job.problems, CONFIG)
    assert verdict_settings(work.job.problems, replace(CONFIG, num_workers=7)) == before
    (tmp_path / "rewards_that_change.py").write_text("def one(**_): return 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    own = replace(CONFIG, custom_functions=["sums=rewards_that_change:one"])
    mine = verdict_settings(work.job.problems, own)
    assert mine != before
    (tmp_path / "rewards_that_change.py").write_text("def one(**_): return 0\n")
    assert verdict_settings(work.job.problems, own) != mine


def test_a_response_that_was_generated_anew_is_judged_anew(work: Work):
    score(work, 2, CountingPool())
    work.store.samples[0, 0] = replace(work.store.samples[0, 0], response="now it is \\boxed{7}")
    pool = CountingPool()
    assert [s.correct for s in score(work, 2, pool).problems[0].samples] == [False, False]
    assert pool.asked == 1
    assert score(work, 2, pool).problems[0].samples[0].answer == "\\boxed{7}"
    assert pool.asked == 1


def test_other_libraries_score_again(work: Work, monkeypatch: pytest.MonkeyPatch):
    score(work, 2, CountingPool())
    monkeypatch.setattr("verl.evaluation.scoring.version", lambda name: "99")
    pool = CountingPool()
    score(work, 2, pool)
    assert pool.asked == 4
    assert verdict_lines(work)[0]["libraries"] == {"math-verify": "99", "latex2sympy2_extended": "99", "sympy": "99"}


def test_a_function_that_fails_costs_its_benchmark(work: Work):
    for error in (
        CustomFunctionError("my_rewards:one raised KeyError: 'x'"),
        ValueError("data_source='sums': unknown"),
        RuntimeError("reward_score.num_workers=2: verifier processes stopped 3 times"),
    ):
        with pytest.raises(ConfigError, match=f"^sums: cannot be scored: {error}"):
            score(work, 2, CountingPool(error))


@pytest.mark.parametrize(
    ("correct", "reason", "code"),
    [
        (True, "exact", "correct"),
        (True, "equivalent", "correct"),
        (True, "custom", "correct"),
        (False, "different", "wrong"),
        (False, "custom", "wrong"),
        (False, "missing", "no_answer"),
        (False, "unparsed", "unparsed"),
        (False, "timeout", "timeout"),
        (False, "memory", "memory"),
        (False, "crash", "crash"),
    ],
)
def test_reason_codes(correct: bool, reason: str, code: str):
    assert reason_code(Score(score=0.0, correctness=correct, boxed=False, reason=reason, answer="")) == code
    assert code in REASONS


@pytest.mark.slow
def test_the_real_pool_judges(work: Work):
    with VerifierPool(replace(CONFIG, num_workers=1)) as pool:
        result = score(work, 2, pool)
    found = [(s.correct, s.reason, s.answer) for p in result.problems for s in p.samples]
    assert found == [(True, "correct", "4"), (False, "wrong", "5"), (False, "no_answer", ""), (True, "correct", "9")]
