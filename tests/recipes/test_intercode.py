"""The shell of InterCode and its reward (arXiv 2306.14898)."""

import math
from types import SimpleNamespace

import pytest

from verl.recipes.intercode import Shell, changes, command_in, reward, similarity

BEFORE = {"a": "1", "b": "2"}


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("ls -l ", "ls -l"),
        ("First\n```bash\nls\n```\nthen\n```\npwd\n```", "pwd"),
        ("```ls", "```ls"),
        ("submit", "submit"),
    ],
)
def test_command_of_a_turn(text: str, command: str):
    assert command_in(text) == command


def test_similarity_of_what_was_printed():
    # "the", "cat" and "sat"; each weighs 1 in both, and 1 + ln(3 / 2) in one of them.
    assert similarity("The cat", "a cat sat") == pytest.approx(1 / (1 + (1 + math.log(1.5)) ** 2))
    pairs = (("", ""), ("a", "b"), ("3", "3"), ("cat", ""), ("ab", "ab"))
    assert [similarity(*pair) for pair in pairs] == [1, 0, 1, 0, 1]


@pytest.mark.parametrize(
    ("after", "printed", "expected"),
    [
        (BEFORE | {"c": "3", "a": "9"}, "12 ok", 1.0),
        (BEFORE | {"c": "3", "a": "9"}, "34 no", 0.67),
        (BEFORE | {"c": "4", "a": "9"}, "12 ok", 0.67),  # the added file has other content
        (BEFORE | {"c": "3", "a": "8"}, "12 ok", 1.0),  # which is not looked at in a modified one
        (BEFORE | {"c": "3"}, "12 ok", 0.67 + 0.33 * (1 - 0.8427007929)),  # one change is missing
        ({"a": "9", "c": "3"}, "12 ok", 0.67 + 0.33 * (1 - 0.8427007929)),  # one is too many
    ],
)
def test_reward(after: dict[str, str], printed: str, expected: float):
    gold = ("12 ok", BEFORE, BEFORE | {"a": "9", "c": "3"})
    assert reward((printed, BEFORE, after), gold) == pytest.approx(expected)
    assert changes(BEFORE, {"a": "9", "c": "3"}) == {("a", "modified"), ("b", "deleted"), ("c", "added")}


@pytest.mark.slow
def test_conversation_with_the_shell(sandbox):
    shell = Shell()
    state = shell.start(SimpleNamespace(extra_info={"setup": "seq 3 > a"}, ground_truth="mkdir d; cp a d/b; wc -l < a"))
    said = []
    for text in ("mkdir d; cd d", "cp ../a b", "wc -l < b; exit 3"):
        state, messages, done, earned = shell.step(state, SimpleNamespace(text=text))
        said += [message["content"] for message in messages]
        assert (done, earned) == (False, 0.0)
    assert said == ["(nothing)", "(nothing)", "3\n"]
    assert shell.step(state, SimpleNamespace(text="submit")) == (state, [], True, pytest.approx(1.0))
