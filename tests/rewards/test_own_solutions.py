"""Published solutions as responses: right against their own answers, wrong against other problems' answers."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import PUBLISHED, scoring

from verl.rewards.answers import normalise
from verl.rewards.pool import VerifierPool

SEED = 7


@pytest.fixture(scope="module")
def pool() -> Iterator[VerifierPool]:
    with VerifierPool(scoring(mode="mix", num_workers=2, timeout_s=20.0, memory_limit_mb=1024)) as pool:
        yield pool


def read_rows(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        pytest.skip(f"not there: {path}")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def deranged(answers: list[str]) -> list[str]:
    """A random order of ``answers`` in which every one meets a different text."""
    rng = random.Random(SEED)
    order = list(answers)
    rng.shuffle(order)
    texts = [normalise(answer) for answer in answers]
    for i in range(len(order)):
        while normalise(order[i]) == texts[i]:
            j = rng.randrange(len(order))
            # A swap that parts one pair must not join another.
            if normalise(order[j]) != texts[i] and normalise(order[i]) != texts[j]:
                order[i], order[j] = order[j], order[i]
    assert sorted(order) == sorted(answers)
    assert all(normalise(a) != text for a, text in zip(order, texts, strict=True))
    return order


def share_correct(pool: VerifierPool, source: str, solutions: list[str], truths: list[str]) -> float:
    scores = pool.score_batch([source] * len(solutions), solutions, truths)
    share = sum(score["correctness"] for score in scores) / len(scores)
    print(f"{source}: {share:.2%} of {len(scores)} correct")
    return share


def check(pool: VerifierPool, source: str, solutions: list[str], truths: list[str]) -> None:
    assert share_correct(pool, source, solutions, truths) >= 0.99
    assert share_correct(pool, source, solutions, deranged(truths)) <= 0.03


def test_gsm8k(pool: VerifierPool):
    rows = read_rows(PUBLISHED / "gsm8k" / "test.jsonl")
    assert len(rows) == 1319
    check(pool, "openai/gsm8k", [r["answer"] for r in rows], [r["answer"].rpartition("####")[2].strip() for r in rows])


def test_math500(pool: VerifierPool):
    rows = read_rows(PUBLISHED / "benchmarks" / "math500" / "test.jsonl")
    assert len(rows) == 500
    check(pool, "HuggingFaceH4/MATH-500", [row["solution"] for row in rows], [row["answer"] for row in rows])
