import json
from typing import Any

import pytest
from conftest import PUBLISHED

from verl.rewards.multiple_choice import read_options, verify_multiple_choice
from verl.rewards.score import Verdict

NUMBERS = ["3", "42"]
HALVES = {"A": "2", "B": r"$\frac{1}{2}$", "C": r"$2 \mathrm{~m}$"}


def is_correct(solution: str, truth: str, options: Any = None) -> bool:
    verdict = verify_multiple_choice(solution, truth, {"options": options})
    assert verdict is not None
    return verdict.correct


@pytest.mark.parametrize(
    ("solution", "letter"),
    [
        (r"\boxed{B}", "B"),
        (r"\boxed{\text{(B)}}", "B"),
        (r"\boxed{\mathbf{B}}", "B"),
        (r"\boxed{b}", "B"),
        (r"\boxed{B. 42}", "B"),
        (r"\boxed{B) 42}", "B"),
        (r"\boxed{(B) 42}", "B"),
        ("(B)", "B"),
        ("B. 42", "B"),
        ("B) 42", "B"),
        ("So it is A.", "A"),
        ("So it is\nA", "A"),
        ("So it is (A)", "A"),
        ("so B", "B"),
        ("The answer is (B).", "B"),
        ("The answer is (A) because it is larger.", "A"),
        ("The answer is A because it is larger.", "A"),
        ("The answer is A", "A"),
        ("The answer is (B), not (A).", "B"),
        ("Answer: B.", "B"),
        ("**Answer:** (B) 42. Done", "B"),
        ("Answer: **B**", "B"),
        (r"the answer is \(B\).", "B"),
        ("The correct option is C) 15", "C"),
        ("the answer must be D, as shown", "D"),
        ("(A) is wrong, (B) is the correct answer", "B"),
        ("ANSWER B", "B"),
        ("Ans A", "A"),
        ("First, the answer is B. No: the answer is C. So the answer is clear.", "C"),
        ("故选B", "B"),
        ("答案是：（C）", "C"),
        (r"\boxed{A} and so \boxed{D}", "D"),
        (r"\boxed{Option B}", "B"),
        (r"\boxed{Answer: (B)}", "B"),
        (r"\boxed{Ｂ}", "B"),
        ("A is not right, so B", "B"),
        ("Not A but B", "B"),
        ("Nothing but B", "B"),
    ],
)
def test_a_letter_is_found(solution: str, letter: str):
    assert is_correct(solution, letter)
    assert not is_correct(solution, "E")


DENIED = (
    "Not B|never B|The answer isn't B.|The answer cannot be B.|It is anything but B|all except B|The wrong answer is B"
    "|The incorrect option is B|The answer is wrong: B|Eliminate B|rule out B|The answer is no longer B"
    "|so it can't be B|The answer is neither A nor B|The answer is none of A, B|so it must not be B"
    "|the opposite of B|6, not \\boxed{B}"
).split("|")


def test_a_label_called_wrong_names_nothing():
    for rest in ("is wrong", "wrong", "is not correct.", "isn't right"):
        assert not is_correct(rf"\boxed{{(B) {rest}}}", "B", NUMBERS)
    assert is_correct(r"\boxed{(B) wrong}", "B", ["right", "wrong"])


@pytest.mark.parametrize(
    ("solution", "truth"),
    [
        ("", "A"),
        ("A triangle has three sides.", "A"),
        ("The answer is A triangle with three sides", "A"),
        ("My answer: A car", "A"),
        ("The answer is a", "A"),
        ("It was a long day for A", "A"),
        ("The answer is Apple", "A"),
        ("The answer is A + B", "A"),
        ("The answer is A or B.", "A"),
        ("The answer is not (B).", "B"),
        ("NOT A", "A"),
        *((text, "B") for text in DENIED),
        (r"\boxed{A, B}", "B"),
        (r"\boxed{A or B}", "A"),
        (r"\boxed{A) 1 B) 2 C) 3}", "A"),
        (r"\boxed{42}", "B"),
        (r"\boxed{BAD}", "B"),
        (r"(B) \boxed{A}", "B"),
    ],
)
def test_no_or_another_letter(solution: str, truth: str):
    assert not is_correct(solution, truth)


@pytest.mark.parametrize(
    ("solution", "truth", "correct"),
    [
        (r"\boxed{A, B}", "AB", True),
        (r"\boxed{BA}", "AB", False),
        (r"\boxed{B, A}", "A B", True),
        (r"\boxed{A \text{ and } C}", "AC", True),
        (r"\boxed{(A)(C)}", "A,C", True),
        (r"\boxed{ACD}", "AC", False),
        (r"\boxed{A}", "AC", False),
    ],
)
def test_several_right_options(solution: str, truth: str, correct: bool):
    assert is_correct(solution, truth) is correct


@pytest.mark.parametrize(
    ("solution", "truth", "options", "correct"),
    [
        (r"\boxed{42}", "B", NUMBERS, True),
        (r"\boxed{3}", "B", NUMBERS, False),
        ("The answer is 42.", "B", NUMBERS, True),
        (r"\boxed{B}", "42", NUMBERS, True),
        (r"\boxed{42}", "42", ["A) 3", "B) 42"], True),
        (r"\boxed{B. 42}", "B", NUMBERS, True),
        (r"\boxed{B. 3}", "B", NUMBERS, False),
        (r"\boxed{X}", "B", ["Y", "X"], True),
        (r"\boxed{a}", "B", ["b", "a"], True),
        (r"\boxed{B and C}", "D", ["x", "y", "z", "B and C"], True),
        (r"\boxed{\text{weathering}}", "A", ["weathering", "succession"], True),
        ("The answer is A car", "A", ["A car", "A bus"], True),
        (r"\boxed{20 min}", "E", ["A)20 min", "B)22 min", "C)23 min", "D)21 min", "E)20 min"], True),
        (r"\boxed{\frac{2}{4}}", "B", HALVES, True),
        (r"\boxed{0.5}", "A", HALVES, False),
        (r"\boxed{2 \mathrm{m}}", "A", HALVES, False),
        (r"\boxed{x+1}", "1+x", None, True),
    ],
)
def test_the_text_of_an_option(solution: str, truth: str, options: Any, correct: bool):
    assert is_correct(solution, truth, options) is correct


def test_verdicts():
    assert verify_multiple_choice(r"\boxed{B}", "B") == Verdict(True, True, "exact", "B")
    assert verify_multiple_choice("so A.", "B") == Verdict(False, False, "different", "so A.")
    assert verify_multiple_choice("no idea", "B") == Verdict(False, False, "missing")
    info = {"options": HALVES}
    assert verify_multiple_choice(r"\boxed{2/4}", "B", info, quick=True) is None
    assert verify_multiple_choice(r"\boxed{2/4}", "B", info) == Verdict(True, True, "equivalent", "2/4")
    assert verify_multiple_choice(r"\boxed{2}", "B", info, quick=True) == Verdict(False, True, "different", "2")


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


@pytest.mark.parametrize(("name", "options", "label"), [("gaokao_math_qa", "options", "label")])
def test_published_options(name: str, options: str, label: str):
    for row in read_rows(name):
        for letter, text in row[options].items():
            for solution in (rf"\boxed{{{letter}}}", rf"\boxed{{{text}}}", f"故选 {letter}."):
                assert is_correct(solution, row[label], row[options]) == (letter == row[label]), row


def test_mmlu_choices():
    confused = 0
    for row in read_rows("mmlu_stem")[:1000]:
        for index, text in enumerate(row["choices"]):
            solution = rf"\boxed{{{text}}}"
            verdict = verify_multiple_choice(solution, "ABCD"[row["answer"]], {"options": row["choices"]}, quick=True)
            confused += verdict is None or verdict.correct != (index == row["answer"])
    # Options like "B" for boron, which read as another option's letter, and texts with a lone brace.
    assert confused / 4000 < 0.01
