import time

import pytest

from verl.rewards import compute_score
from verl.rewards.countdown import read_truth, verify_countdown
from verl.rewards.registry import find_scorer, quick_verdict

TRUTH = {"target": 24, "numbers": [3, 3, 8, 8]}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("8 / (3 - 8 / 3)", "exact"),
        ("8/(3-8/3) = 24", "exact"),
        (r"8 \div (3 - 8 ÷ 3)", "exact"),
        (r"\boxed{8 / (3 - 8 / 3)}", "exact"),
        ("(8 / ((3) - +8 / 3))", "exact"),
        ("-8 / (8 / 3 - 3)", "exact"),
        *(
            (form, "exact")
            for form in ("$8/(3-8/3)$", "**8/(3-8/3)**", "`8/(3-8/3)`", r"\(8/(3-8/3)\)", "8/(3-8/3)=24.")
        ),
        *((form, "exact") for form in (r"\frac{8}{3-\frac{8}{3}}", r"8/\left(3-8/3\right)", "[8/(3-8/3)]")),
        (r"\frac{8}{3-\frac{8}{3}", "unparsed"),
        (r"\frac{" * 60 + "8", "unparsed"),
        ("8 / (3 - 8 / 3) = 23", "unparsed"),
        ("3 * 8", "different"),
        ("3 + 3 + 8 + 8", "different"),
        ("3 * 8 * (3 - 8 + 8) / 3", "different"),
        ("24", "different"),
        ("38 - 8 - 3 - 3", "different"),
        ("(8 - 8) / 3 + 3", "different"),
        ("3 / (8 - 8) + 3", "different"),
        ("8 ** 3 // 8 3", "unparsed"),
        ("3 3 8 8", "unparsed"),
        ("3 + 3 + 8 8 +", "unparsed"),
        ("(3 + 3 + 8 * 8", "unparsed"),
        ("3 + 3 + 8 * 8)", "unparsed"),
        ("3(3) + 8 * 8", "unparsed"),
        ("3 + 3 + 8 * 8.0", "unparsed"),
        ("eight times three", "unparsed"),
        ("__import__('os')", "unparsed"),
        ("3 + 3 + ٨ * 8", "unparsed"),
        ("(" * 300 + "8", "different"),
        ("-" * 396 + "8", "different"),
        ("8 / (3 - 8 / 3)" + " " * 400 + "+", "unparsed"),
    ],
)
def test_an_expression_with_every_number_once(answer: str, reason: str):
    verdict = verify_countdown(f"<think>8 * 3</think> <answer>{answer}</answer>", TRUTH)
    assert (verdict.reason, verdict.correct, verdict.boxed) == (reason, reason == "exact", True)


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<answer>1 + 2</answer>", 1.0),
        (r"\boxed{2 + 1}", 1.0),
        ("The answer is 1 + 2.", 0.5),
        ("<answer>1 - 2</answer>", -0.5),
        ("The answer is 1 * 2.", -1.0),
        ("1 + 2", -1.0),
        ("<answer>1 + 2</answer> no: <answer>2 - 1</answer>", -0.5),
        ("<think><answer>1 + 2</answer>", -1.0),
    ],
)
def test_scores(response: str, score: float):
    assert compute_score("countdown", response, {"target": 3, "numbers": [1, 2]})["score"] == score


@pytest.mark.parametrize(
    "truth",
    [
        {"target": 3, "numbers": [1, 2]},
        {"target": 3.0, "numbers": (1.0, 2), "id": "x"},
        '{"target": 3, "numbers": [1, 2]}',
    ],
)
def test_ground_truths(truth: object):
    assert read_truth(truth) == (3, [1, 2])


@pytest.mark.parametrize(
    "truth",
    [
        "3",
        "{",
        [3, [1, 2]],
        {"target": 3},
        {"target": 3, "numbers": []},
        {"target": 3, "numbers": [1] * 33},
        {"target": 3, "numbers": [1, "2"]},
        {"target": 3, "numbers": [1, -2]},
        {"target": 3, "numbers": [1, True]},
        {"target": 0.5, "numbers": [1, 2]},
        {"target": 10**13, "numbers": [1, 2]},
        {"target": 3, "numbers": "12"},
    ],
)
def test_what_is_no_ground_truth(truth: object):
    with pytest.raises(ValueError, match="must give a target and 1 to 32 numbers, all whole and up to 1e"):
        read_truth(truth)


def test_the_longest_problem_is_quick():
    numbers = [10**12 - i for i in range(25)]
    expression = "/".join(f"({number}" for number in numbers) + ")" * 25
    assert len(expression) <= 400
    truth = {"target": 1, "numbers": numbers}
    started = time.perf_counter()
    for _ in range(20):
        verdict = quick_verdict(find_scorer("countdown"), "countdown", f"<answer>{expression}</answer>", truth, None)
    assert verdict is not None and verdict.reason == "different"
    # Well under a millisecond each; the bound leaves room for a loaded machine.
    assert (time.perf_counter() - started) / 20 < 0.01
