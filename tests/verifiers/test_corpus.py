"""The verdicts of the verifiers are those of a careful reader on every case of ``corpus/*.jsonl`` and ``blind.tsv``."""

import json
from pathlib import Path

import bench_verdicts
import pytest

from verl.rewards import compute_score

EXCEPTIONS = {
    "math": {
        # Conditions on x as a set, and an equation whose left side is no name.
        r"We compute the value and get $\boxed{x \le 5 \text{ and } x \ne 1}$.": False,
        "The answer is $x+y=2+3=5$.": False,
    }
}
"""Family -> response and our verdict, where the reader's differs."""

CORPUS = bench_verdicts.read_corpus()


@pytest.mark.parametrize("family", bench_verdicts.SOURCES)
def test_verdicts_are_a_careful_readers(family: str):
    rows = CORPUS[family]
    assert len(rows) > 180 and 0.4 < sum(row["correct"] for row in rows) / len(rows) < 0.6
    wrong = {}
    for row in rows:
        score = compute_score(bench_verdicts.SOURCES[family], row["response"], row["truth"], row.get("extra_info"))
        if score["acc"] != row["correct"]:
            wrong[row["response"]] = score["acc"]
    assert wrong == EXCEPTIONS.get(family, {})
    assert len(wrong) <= 0.02 * len(rows)


@pytest.mark.parametrize("source", ["math", "gsm8k", "multiple_choice", "countdown", "kk"])
def test_blind_verdicts_are_a_careful_readers(source: str):
    lines = Path(__file__).with_name("blind.tsv").read_text("utf-8").split("\n")
    rows = [line.replace("⏎", "\n").split("\t") for line in lines if line.startswith(f"{source}\t")]
    assert len(rows) > 140
    differing = []
    for _, label, truth, response, *info in rows:
        score = compute_score(source, response, truth, json.loads(info[0]) if info else None)
        if score["acc"] != (label == "right"):
            differing.append((label, truth, response, score["answer"]))
    assert len(differing) <= 0.02 * len(rows), differing
