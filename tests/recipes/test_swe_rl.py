"""The similarity of diffs that rewards edits (arXiv 2502.18449)."""

import pytest

from verl.recipes.swe_rl import rows, score

FILES = {"a.py": "a\nb\n", "b.py": "x\n"}
TRUTH = {"before": FILES, "after": {"a.py": "a\nc\n"}}


def block(path: str, search: str, replacement: str, fence: str = "```") -> str:
    return f"{fence}python\n### {path}\n<<<<<<< SEARCH\n{search}\n=======\n{replacement}\n>>>>>>> REPLACE\n{fence}\n"


def response(*blocks: str, thought: str = "well") -> str:
    return f"<think>{thought}</think>\n<solution>\n{''.join(blocks)}</solution>"


RIGHT = block("a.py", "b", "c")


@pytest.mark.parametrize(
    ("given", "reward"),
    [
        (response(RIGHT), 1.0),
        # "@@ -1,2 +1,2 @@", " a", "-b" and "+d": 23 of 24 characters agree.
        (response(block("a.py", "b", "d")), 23 / 24),
        # A file too many, and the wrong one, each worth nothing.
        (response(RIGHT, block("b.py", "x", "y")), 0.5),
        (response(block("b.py", "x", "y")), 0.0),
        (response(block("new.py", "", "c")), 0.0),
        # A second block sees what the first one wrote.
        (response(block("a.py", "a\nb", "a\nd"), block("a.py", "d", "c")), 1.0),
        (response(RIGHT, block("b.py", "z", "y")), -1.0),  # not found
        (response(block("a.py", "b", "b")), -1.0),  # changes nothing
        (response(RIGHT, block("a.py", "b", "d")), -1.0),  # no longer there
        (response(RIGHT, thought=" "), -1.0),
        (response(block("a.py", "b", "c", fence="")), -1.0),
        (response(), -1.0),
        (response(RIGHT) + "</solution>", -1.0),
        (response(RIGHT[:-20]), -1.0),
        (RIGHT, -1.0),
        ("", -1.0),
    ],
)
def test_edits_are_worth_the_similarity_of_their_diffs(given: str, reward: float):
    found = score("edit_task", given, TRUTH)
    assert found == {"score": pytest.approx(reward), "acc": reward == 1.0}


def test_task_has_right_answers():
    for row in rows(100, seed=3):
        truth = row["reward_model"]["ground_truth"]
        before, after = truth["before"]["tools.py"].rstrip(), truth["after"]["tools.py"].rstrip()
        assert before in row["prompt"][0]["content"]
        assert score("edit_task", response(block("tools.py", before, after)), truth)["score"] == 1.0
