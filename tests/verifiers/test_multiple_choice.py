import json
from typing import Any

import pytest
from conftest import PUBLISHED

from verl.verifiers.multiple_choice import read_options, verify_multiple_choice


def is_correct(solution: str, truth: str, options: Any = None) -> bool:
    verdict = verify_multiple_choice(solution, truth, {"options": options})
    assert verdict is not None
    return verdict.correct


@pytest.mark.parametrize(
    ("options", "read"),
    [
        (["3", "42"], {"A": "3", "B": "42"}),
        (["A)3", "B) 42"], {"A": "3", "B": "42"}),
        (["(A) 3", "(B) 42"], {"A": "3", "B": "42"}),
        (["A. 3", "B. 42"], {"A": "3", "B": "42"}),
        (["A. Smith", "C. Jones"], {"A": "A. Smith", "B": "C. Jones"}),
        ("A) 3 B) 42, C) (A) x", {"A": "3", "B": "42", "C": "(A) x"}),
        ("(A) 3\n(B) 42", {"A": "3", "B": "42"}),
        ({"A": "3", "B": "42", "C": None}, {"A": "3", "B": "42"}),
        ([], {}),
        ("", {}),
        (None, {}),
    ],
)
def test_read_options(options: Any, read: dict[str, str]):
    assert read_options(options) == read


def read_rows(name: str) -> list[dict[str, Any]]:
    path = PUBLISHED / "benchmarks" / name / "test.jsonl"
    if not path.exists():
        pytest.skip(f"the benchmark {name} is not at {path}")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_aqua_rationales():
    rows = read_rows("aqua")
    right = sum(is_correct(row["rationale"], row["correct"], row["options"]) for row in rows)
    others = sum(is_correct(row["rationale"], letter, row["options"]) for row in rows for letter in "ABCDE")
    # 240 of 254; the others name no option, or a wrong one.
    assert right / len(rows) >= 0.94
    assert (others - right) / len(rows) <= 0.01


def test_published_options():
    for row in read_rows("gaokao_math_qa"):
        for letter, text in row["options"].items():
            for solution in (rf"\boxed{{{letter}}}", rf"\boxed{{{text}}}", f"故选 {letter}."):
                assert is_correct(solution, row["label"], row["options"]) == (letter == row["label"]), row


def test_mmlu_choices():
    confused = 0
    for row in read_rows("mmlu_stem")[:1000]:
        for index, text in enumerate(row["choices"]):
            solution = rf"\boxed{{{text}}}"
            verdict = verify_multiple_choice(solution, "ABCD"[row["answer"]], {"options": row["choices"]}, quick=True)
            confused += verdict is None or verdict.correct != (index == row["answer"])
    # Options like "B" for boron, which read as another option's letter, and texts with a lone brace.
    assert confused / 4000 < 0.01
