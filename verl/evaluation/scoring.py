"""Scores stored samples. Verdicts are saved alongside the samples and recomputed if their inputs change.

The first line of ``verdicts.jsonl`` records the inputs of the verdicts: the verifiers' source, libraries and limits,
and the problems' answers. Each verdict includes the digest of its response. Scoring never generates samples.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import verl.rewards
from verl.config.errors import ConfigError
from verl.config.judge import JUDGE
from verl.config.rewards import RewardScoreConfig, summands
from verl.data.templates import find_template
from verl.evaluation.benchmarks import Problem
from verl.evaluation.results import PROMPT_TOO_LONG, REASONS, ProblemResult, ScoredSample, TaskResult
from verl.evaluation.store import RecordFile, SampleKey, StoredSample, digest
from verl.evaluation.tasks import EvaluationTask
from verl.rewards.pool import VerifierPool
from verl.rollout.programs import with_solutions
from verl.utils.user_code import source_file
from verl.verifiers.verdict import Verdict
from verl_pages.sample_files import shown_truth

VERDICTS_FILE = "verdicts.jsonl"

BATCH_SIZE = 1024
"""Number of samples that are scored and saved at a time."""

LIBRARIES = ("math-verify", "latex2sympy2_extended", "sympy")
"""Libraries that verifiers use to compare answers."""

KEPT_REASONS = ("unparsed", "timeout", "memory", "crash", "error")
"""Verifier reasons that are also reason codes. All other reasons for wrong answers become ``wrong``."""

NOT_GENERATED = ScoredSample("", 0, truncated=False, correct=False, answer="", reason=PROMPT_TOO_LONG)
"""Placeholder sample for a problem whose prompt is too long for the model."""


@dataclass(frozen=True)
class StoredVerdict:
    """A verifier's verdict on one sample."""

    problem: int
    sample: int
    response: str
    """Digest of the response, used to detect whether the response was regenerated."""
    correct: bool
    answer: str
    reason: str
    reward_extra_info: dict[str, Any]
    """Additional values returned by a custom reward function."""

    def __post_init__(self) -> None:
        if self.reason not in REASONS:
            raise TypeError(f"{self.reason!r:.80} is not a reason code")


def score_samples(
    task: EvaluationTask,
    samples: Mapping[SampleKey, StoredSample],
    n: int,
    verifiers: VerifierPool,
    scored: bool = True,
) -> TaskResult:
    """Return the result of a task with complete samples, computing missing and outdated verdicts.

    If ``scored`` is False, no verifier runs, and responses with a positive environment reward count as correct. Raises
    ``ConfigError`` if :func:`score_batches` fails or a line of the verdict file is damaged.
    """
    verdicts = _verdicts(task, samples, n, verifiers) if scored else {}

    def scored_sample(key: SampleKey) -> ScoredSample:
        if key[0] in task.unanswered:
            return NOT_GENERATED
        s, v = samples[key], verdicts.get(key)
        won = s.environment.get("reward", 0.0) > 0
        facts = (won, "", "correct" if won else "wrong") if v is None else (v.correct, v.answer, v.reason)
        extras = {} if v is None else v.reward_extra_info
        known: dict[str, Any] = {"metrics": s.metrics, "conversation": s.conversation, "environment": s.environment}
        return ScoredSample(s.response, s.num_tokens, s.truncated, *facts, **known, extras=extras)

    answers = [shown_truth(json.dumps(problem.answer)) for problem in task.problems]
    results = [
        ProblemResult(problem.index, problem.question, answers[i], [scored_sample((i, j)) for j in range(n)])
        for i, problem in enumerate(task.problems)
    ]
    return TaskResult(task.target.run, task.target.step, task.benchmark, task.temperature, results)


def _verdicts(
    task: EvaluationTask, samples: Mapping[SampleKey, StoredSample], n: int, verifiers: VerifierPool
) -> dict[SampleKey, StoredVerdict]:
    """Return the verdicts on all samples, after computing and storing missing or outdated verdicts."""
    keys = [(i, j) for i in range(len(task.problems)) if i not in task.unanswered for j in range(n)]
    digests = {key: digest_of(samples[key].response) for key in keys}
    settings = verdict_settings(task.problems, verifiers.config)
    with RecordFile(task.folder / VERDICTS_FILE, StoredVerdict, settings) as file:
        verdicts = {(v.problem, v.sample): v for v in file.records}
        waiting = [key for key in keys if key not in verdicts or verdicts[key].response != digests[key]]
        for batch in score_batches(task, samples, waiting, verifiers):
            for key, score in batch.items():
                extras, reason = dict(score.extras), reason_code(score)
                verdicts[key] = StoredVerdict(*key, digests[key], score.correct, score.answer, reason, extras)
            file.write([verdicts[key] for key in batch])
    return verdicts


def score_batches(
    task: EvaluationTask,
    samples: Mapping[SampleKey, StoredSample],
    keys: Sequence[SampleKey],
    verifiers: VerifierPool,
) -> Iterator[dict[SampleKey, Verdict]]:
    """Yield the verdicts on the samples in ``keys``, in batches of ``BATCH_SIZE``.

    Raises ``ConfigError`` if a custom reward function fails, or if the verifiers or programs cannot be run.
    """
    for start in range(0, len(keys), BATCH_SIZE):
        batch = keys[start : start + BATCH_SIZE]
        problems = [task.problems[i] for i, _ in batch]
        responses = [samples[key].response for key in batch]
        try:
            if find_template(task.target.template).python == "solution":
                responses = with_solutions(responses)
            scores = verifiers.score_batch(
                [problem.data_source for problem in problems],
                responses,
                [problem.answer for problem in problems],
                [problem.extra_info for problem in problems],
                [task.opens_thought] * len(batch),
            )
        # Custom functions raise ValueError. The pool raises RuntimeError if its processes keep dying, and the sandbox
        # raises RuntimeError if it cannot be created.
        except (ValueError, RuntimeError) as error:
            raise ConfigError(f"{task.benchmark}: cannot be scored: {error}") from error
        yield dict(zip(batch, scores, strict=True))


def verdict_settings(problems: Sequence[Problem], config: RewardScoreConfig) -> dict[str, Any]:
    """Return everything that the verdicts depend on, except the responses."""
    sources = [path for package in verl.rewards.__path__ for path in sorted(Path(package).iterdir()) if path.is_file()]
    functions = [part for path in config.paths_of_custom_functions().values() for _, part in summands(path)]
    sources += [path for path in map(source_file, functions) if path is not None]
    truths = [[problem.answer, problem.data_source, dict(problem.extra_info)] for problem in problems]
    return {
        "verifiers": digest(b"".join(path.read_bytes() for path in sources)),
        "libraries": {name: version(name) for name in LIBRARIES},
        "problems": digest(json.dumps(truths, sort_keys=True).encode()),
        "timeout_s": config.timeout_s,
        "memory_limit_mb": config.memory_limit_mb,
        "custom_functions": config.paths_of_custom_functions(),
        "custom_kwargs": config.custom_kwargs,
        **({"judge": config.function_kwargs[JUDGE]} if config.judge.enable else {}),
    }


def reason_code(score: Verdict) -> str:
    """Map a verdict to a reason code from ``verl.evaluation.results.REASONS``."""
    if score.correct:
        return "correct"
    if score.reason == "missing":
        return "no_answer"
    return score.reason if score.reason in KEPT_REASONS else "wrong"


def digest_of(response: str) -> str:
    return digest(response.encode(errors="surrogatepass"))
