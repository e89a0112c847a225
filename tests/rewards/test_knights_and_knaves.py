import json

import pytest

from verl.rewards.knights_and_knaves import read_statements, read_truth, verify_knights_and_knaves
from verl.rewards.score import Verdict

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


@pytest.mark.parametrize(
    ("answer", "correct"),
    [
        (TRUTH, True),
        ("(2) Bob is a knave\n(1) Alice is a knight", True),
        ("Alice is a knight, and Bob is a knave.", True),
        ("**ALICE**: knight; **Bob**: knave", True),
        ('{"Alice": "knight", "Bob": "knave"}', True),
        (r"\text{Alice is a knight}, \text{Bob is a knave}", True),
        ("Alice is a knight. Alice is a knight and Bob is a knave", True),
        ("Alice is a knight and Bob is not a knight", True),
        ("Alice is a knight, not a knave. Bob isn't a knight", True),
        ("Alice is a knight and Bob is a knave, but there is no Zoe", True),
        ("Alice is a knave, Bob is a knave", False),
        ("Alice and Bob are knights", False),
        ("Alice is a knight", False),
        ("Alice is a knight or a knave, Bob is a knave", False),
        ("Alice is a knight/knave. Bob is a knave", False),
        ("Alice is neither a knight nor a knave, Bob is a knave", False),
        ("Alice is a knight, Bob is a knave, Alice is a knave", False),
        ("Alicea is a knight, Bob is a knave", False),
        ("Alice is a nightknight, Bob is a knave", False),
        ("knight, knave", False),
    ],
)
def test_answers(answer: str, correct: bool):
    for solution in (f"Suppose Alice is a knave. <answer>{answer}</answer>", f"Alice is a knave. CONCLUSION: {answer}"):
        verdict = verify_knights_and_knaves(solution, TRUTH)
        assert verdict.correct is correct
        assert verdict.boxed is solution.endswith("</answer>")


NOT_SAID = (
    "never a|no|hardly a|anything but a|far from being a|a fake|the opposite of a|not a|**not** a|isnt a|isn’t a|n't a"
    "|wasn't a|ain't a|cant be a|unlikely to be a|rarely a|a non-|neither a knave nor a|possibly a|thought to be a"
).split("|")
DENIED = [
    *(
        "It is false that Alice is a knight",
        "It is not the case that Alice is a knight",
        "It's a lie that Alice is a knight",
    ),
    *("Neither Alice nor Bob is a knight", "I doubt that Alice is a knight", "There is no way Alice is a knight"),
    *("Nobody thinks Alice is a knight", "No way is Alice a knight", "never is Alice a knight"),
    *("If Alice is a knight", "Suppose Alice is a knight", "Alice is a knight? No", "Alice is a knight is false"),
    *("Alice is a knight in no way", "Alice: ~knight", "Alice: !knight", "Alice: -knight", "Alice: knight (no)"),
    *("Alice: knight ❌", "Alice is a knight, NOT!", "Alice is a knight... not", "Bob says Alice is a knight"),
    *("None of this is true: Alice is a knight", "The opposite: Alice is a knight"),
    *("Alice being a knight is impossible", "Alice ≠ knight", "Alice != knight", r"Alice \neq knight"),
]


@pytest.mark.parametrize(
    "answer",
    [
        *("Either Alice is a knight or Bob is a knave", "Alice is a knight xor Bob is a knave"),
        *("Alice is a knight iff Bob is a knave", "Alice is a knight. Bob is a knave. This is false"),
        *("Alice is a knight. Bob is a knave. That is not true.", "Alice is a knight. Bob is a knave. Not!"),
    ],
)
def test_what_is_not_said_of_both(answer: str):
    assert not verify_knights_and_knaves(f"<answer>{answer}</answer>", TRUTH).correct


@pytest.mark.parametrize("denial", [*(f"Alice is {words} knight" for words in NOT_SAID), *DENIED])
def test_what_is_not_said_of_alice(denial: str):
    for rest in (". Bob is a knave", "\n(2) Bob is a knave"):
        assert not verify_knights_and_knaves(f"<answer>{denial}{rest}</answer>", TRUTH).correct


@pytest.mark.parametrize(
    "answer",
    [
        "Alice must be a knight. Bob must be a knave",
        "Alice is therefore a knight and Bob is clearly a knave",
        "Alice = knight; Bob → knave",
        r"Alice \rightarrow \text{knight}, Bob \rightarrow \text{knave}",
        "| Alice | knight |\n| Bob | knave |",
        "No, Alice is a knight and Bob is no knight",
        "Alice's role: knight. Bob's role: knave",
        "It is false that Alice is a knave. Bob is a knave",
        "Alice is a knight (a truth-teller). Bob is a knave!",
        "Bob is a knight? This is false. Alice is a knight. Bob is a knave",
    ],
)
def test_other_words_for_the_same(answer: str):
    assert verify_knights_and_knaves(f"<answer>{answer}</answer>", TRUTH).correct


def test_statements():
    people = ["alice", "bob", "mr. x"]
    text = "Alice and Bob are knights. Mr. X told Bob: nothing.\nBob says Mr. X is not a knave"  # quoted, not said
    assert read_statements(text, people) == [("alice", "knight"), ("bob", "knight")]


def test_where_the_answer_stands():
    right, wrong = "Alice is a knight, Bob is a knave", "Alice is a knave, Bob is a knave"
    for solution, verdict in [
        (rf"\boxed{{{right}}} <answer>{wrong}</answer>", Verdict(False, True, "different", wrong)),
        (f"<answer>{wrong}</answer> <answer>{right}</answer>", Verdict(True, True, "exact", right)),
        (rf"\boxed{{{right}}} CONCLUSION: {wrong}", Verdict(True, True, "exact", right)),
        (f"CONCLUSION: {wrong} ### Conclusion **: {right}", Verdict(True, False, "exact", right)),
        (f"{wrong}. So {right}", Verdict(True, False, "exact", f"{wrong}. So {right}")),
        (f"{right}. So {wrong}", Verdict(False, False, "different", f"{right}. So {wrong}")),
        ("no idea", Verdict(False, False, "missing")),
        ("<answer>both</answer>", Verdict(False, True, "missing")),
    ]:
        assert verify_knights_and_knaves(solution, TRUTH) == verdict
        assert verify_knights_and_knaves(solution, TRUTH, quick=True) == verdict
