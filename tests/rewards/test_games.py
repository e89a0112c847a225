"""Ground truths of Countdown and of Knights and Knaves; their verdicts are in ``verdicts.tsv``."""

import json
import time

import pytest

from verl.rewards import countdown
from verl.rewards.knights_and_knaves import read_statements, read_truth, verify_knights_and_knaves
from verl.rewards.registry import find_scorer, quick_verdict

TRUTH = "(1) Alice is a knight\n(2) Bob is a knave"
AS_DICT = {"alice": "knight", "bob": "knave"}


@pytest.mark.parametrize(
    "truth",
    [
        TRUTH,
        '{"Alice": "knight", "Bob": "knave"}',
        ' {"Alice": "Knight", "Bob": "KNAVE"}',
        "Alice is a knight, and Bob is a knave.",
        "Bob is a knave, Alice is a knight",
    ],
)
def test_read_truth(truth: str):
    assert read_truth(truth) == AS_DICT


@pytest.mark.parametrize(
    "truth",
    [
        *("", "{}", '{"Alice": "spy"}', '{"Alice": true}', "{", "Alice is a spy"),
        *('{"": "knight"}', '{"knight": "knight"}', '{" ": "knave", "Bob": "knight"}'),
        *('{"Alice": "knight", "ALICE": "knave"}', "Alice is a knight, Bob is a knave, Alice is a knave"),
        json.dumps({f"person {i}": "knight" for i in range(100)}),
        json.dumps({"A" * 1000: "knight"}),
    ],
)
def test_unusable_truth(truth: str):
    with pytest.raises(ValueError, match="must say of each person whether they are a knight or a knave"):
        verify_knights_and_knaves("<answer>Alice is a knight</answer>", truth)


def test_statements():
    people = ["alice", "bob", "mr. x"]
    text = "Alice and Bob are knights. Mr. X told Bob: nothing.\nBob says Mr. X is not a knave"  # quoted, not said
    assert read_statements(text, people) == [("alice", "knight"), ("bob", "knight")]


@pytest.mark.parametrize(
    "truth",
    [
        {"target": 3, "numbers": [1, 2]},
        {"target": 3.0, "numbers": (1.0, 2), "id": "x"},
        '{"target": 3, "numbers": [1, 2]}',
    ],
)
def test_read_problem(truth: object):
    assert countdown.read_truth(truth) == (3, [1, 2])


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
def test_unusable_problem(truth: object):
    with pytest.raises(ValueError, match="must give a target and 1 to 32 numbers, all whole and up to 1e"):
        countdown.read_truth(truth)


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
