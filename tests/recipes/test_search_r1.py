"""Search over a few documents, and the answers to a question (arXiv 2503.09516)."""

import math
from types import SimpleNamespace

import pytest

from verl.recipes.search_r1 import Search, action_in, best, rows
from verl.verifiers.search_r1 import squad

DOCUMENTS = ["Ada lives in Bonn.", "Bonn is in Germany.", "Ada, Ada, Ada!"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("I look. <search> Ada </search> <answer>x</answer>", ("search", "Ada")),
        ("<answer>x</answer> <search>y</search>", ("answer", "x")),
        ("<search>y <answer>x</answer>", ("answer", "x")),
        ("<search>y", ("", "")),
        ("", ("", "")),
    ],
)
def test_action(text: str, expected: tuple[str, str]):
    assert action_in(text) == expected


def test_answers_are_compared_by_their_words():
    assert squad(" The United  States, of America!") == "united states of america"


def test_bm25(monkeypatch: pytest.MonkeyPatch):
    # Mean length 11 / 3. "ada" is in two of three: ln(1.6); once of 4 words, or three times of 3.
    lengths = {n: 0.9 * (0.6 + 0.4 * n * 3 / 11) for n in (3, 4)}
    once, thrice = (math.log(1.6) * f / (f + lengths[n]) for f, n in ((1, 4), (3, 3)))
    assert thrice > once and best("ada?", DOCUMENTS) == [DOCUMENTS[2], DOCUMENTS[0]]
    # "lives" is in one: ln(1 + 2.5 / 1.5) / (1 + ...) more than makes up for it.
    assert once + math.log(8 / 3) / (1 + lengths[4]) > thrice
    assert best("lives ada", DOCUMENTS) == [DOCUMENTS[0], DOCUMENTS[2]]
    assert best("in", DOCUMENTS * 2) == [DOCUMENTS[0], DOCUMENTS[1], DOCUMENTS[0]]
    assert best("Rome", DOCUMENTS) == best("Ada", []) == []


def test_conversation():
    (row,) = rows(1, seed=3)
    record = SimpleNamespace(extra_info=row["extra_info"], ground_truth=row["reward_model"]["ground_truth"])
    name = " ".join(row["prompt"][0]["content"].split()[4:6])
    search = Search()
    state = search.start(record)

    def step(text: str):
        return search.step(state, SimpleNamespace(text=text))[1:]

    (message,), done, _ = step(f"<search>Where lives {name}?</search>")
    city = message["content"].partition(f"{name} lives in ")[2].partition(".")[0]
    (message,), done, earned = step(f"<search>{city}</search>")
    assert f"{city} is in {record.ground_truth}." in message["content"] and (done, earned) == (False, 0.0)
    assert step(f"<answer>{record.ground_truth.lower()}.</answer>") == ([], True, 1.0)
    assert step("<answer>Nowhere</answer>") == ([], True, 0.0)
    assert step("Hm.")[0][0]["content"].startswith("Write <search>")
