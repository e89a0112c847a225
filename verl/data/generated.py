"""Generation of problems for disjoint dataset splits."""

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass

from verl.config.checks import require

SPLIT_SHARES = {"train": 12, "sft_train": 12, "test": 4, "sft_val": 4}
"""Maps each split to its share of all questions, in units of 1/32."""

MAX_MISSES = 10_000
"""Maximum number of consecutive draws without a new question before the task is considered exhausted."""


@dataclass(frozen=True)
class GeneratedProblem:
    """A question with a worked solution."""

    question: str
    solution: str
    """Worked steps that end with the answer in the format expected by the task's verifier."""
    answer: str
    """Nonnegative decimal integer without leading zeros."""
    kind: str
    """Kind of problem, as defined by the task."""


def draw_split(
    task: str, draw: Callable[[random.Random], GeneratedProblem], name: str, size: int, seed: int
) -> list[GeneratedProblem]:
    """Draw ``size`` problems with distinct questions from the split ``name``, a key of ``SPLIT_SHARES``.

    :func:`split_of` assigns each question to one split, so splits never overlap, whatever the seeds and sizes. The
    problems for a smaller ``size`` are a prefix of those for a larger one. Raises ``ValueError`` if the split is
    unknown or the task has too few distinct questions.
    """
    require(name in SPLIT_SHARES, "split", name, f"must be one of {', '.join(SPLIT_SHARES)}")
    require(size >= 0, "size", size, "must be at least 0")
    rng = random.Random(f"{task}/{name}/{seed}")
    problems: dict[str, GeneratedProblem] = {}
    misses = 0
    while len(problems) < size:
        problem = draw(rng)
        if split_of(problem.question) == name and problem.question not in problems:
            problems[problem.question] = problem
            misses = 0
        else:
            misses += 1
            fix = f"only {len(problems)} distinct questions found; vary the task or ask for fewer"
            require(misses < MAX_MISSES, f"size of {name}", size, fix)
    return list(problems.values())


def split_of(question: str) -> str:
    """Return the split of ``question``, determined by a hash of its text."""
    bucket = hashlib.blake2b(question.encode(), digest_size=8).digest()[0] % sum(SPLIT_SHARES.values())
    for name, share in SPLIT_SHARES.items():
        if bucket < share:
            return name
        bucket -= share
    raise AssertionError("buckets cover all shares")
