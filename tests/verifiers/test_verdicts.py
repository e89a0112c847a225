"""The verdict of every verifier on each row of ``verdicts.tsv``, and the rules that hold for all of them."""

import json
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from verl.rewards import compute_score
from verl.rewards.registry import Job, find_scorer
from verl.verifiers.math import Tolerance


class Row(NamedTuple):
    verifier: str
    truth: str
    response: str
    info: dict[str, Any] | None
    reason: str
    boxed: bool
    answer: str


def read_table() -> list[Row]:
    lines = (Path(__file__).parent / "verdicts.tsv").read_text("utf-8").splitlines()
    rows = []
    for line in lines:
        if not line.startswith("# "):
            columns = [text.replace("⏎", "\n").replace("⇥", "\t") for text in line.split("\t")]
            verifier, truth, response, info, reason, boxed, answer = columns + [""] * (7 - len(columns))
            extra_info = json.loads(info) if info else None
            rows.append(Row(verifier, truth, response, extra_info, reason, boxed == "b", answer))
    return rows


ROWS = read_table()
VERIFIERS = "arithmetic countdown deepseek_r1 gsm8k kk math multiple_choice open_answer search_r1".split()


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_verdicts(verifier: str):
    rows = [row for row in ROWS if row.verifier == verifier]
    assert len(rows) > 25
    unexpected = []
    for row in rows:
        score = compute_score(verifier, row.response, row.truth, row.info)
        quick = Job(find_scorer(verifier), verifier, row.response, row.truth, row.info).verdict(quick=True)
        # A quick verdict is the final one; what needs algebra has none.
        agrees = quick is None if row.reason == "equivalent" else quick is None or quick.reason == row.reason
        verdict = score["reason"], score["boxed"], score["answer"]
        if verdict != (row.reason, row.boxed, row.answer) or not agrees:
            unexpected.append((row, score, quick))
        assert score["acc"] == (score["reason"] in ("exact", "equivalent"))
    assert unexpected == []


def test_table_covers_every_verifier():
    assert {row.verifier for row in ROWS} == set(VERIFIERS)
    for verifier in VERIFIERS:
        reasons = [row.reason for row in ROWS if row.verifier == verifier]
        assert min(reasons.count("exact"), len(reasons) - reasons.count("exact")) >= 5


@pytest.mark.parametrize(
    ("solution", "independent", "mix"),
    [(r"\boxed{12}", 1.0, 1.0), ("12", 0.5, 1.0), (r"\boxed{13}", -0.5, 0.0), ("13", -1.0, 0.0), ("", -1.0, 0.0)],
)
@pytest.mark.parametrize("source", ["arithmetic", "openai/gsm8k", "math"])
def test_scores(source: str, solution: str, independent: float, mix: float):
    assert compute_score(source, solution, "12", {"index": 1})["score"] == independent
    assert compute_score(source, solution, "12", mode="mix")["score"] == mix


def test_form_of_deepseek_r1_takes_the_place_of_the_box():
    forms = ("</think><answer>{}</answer>", "<answer>{}</answer>")
    scores = [compute_score("deepseek_r1", form.format(x), "5")["score"] for form in forms for x in "56"]
    assert scores == [1.0, -0.5, 0.5, -1.0]


RIGHT = {
    "math": (r"\boxed{17}", "17"),
    "gsm8k": ("So #### 17", "17"),
    "arithmetic": ("17", "17"),
    "multiple_choice": ("The answer is (B)", "B"),
    "open_answer": (r"\boxed{17 cm}", "17 cm"),
    "deepseek_r1": ("<answer>17</answer>", "17"),
    "kk": ("<answer>Alice is a knight</answer>", "(1) Alice is a knight"),
    "countdown": ("<answer>20 - 3</answer>", {"target": 17, "numbers": [3, 20]}),
    "search_r1": ("<answer>the Beatles</answer>", {"target": ["Fab Four", "Beatles"]}),
}
"""Verifier -> a right response, its ground truth."""


@pytest.mark.parametrize("source", VERIFIERS)
def test_only_what_follows_the_thoughts_is_graded(source: str):
    right, truth = RIGHT[source]
    forms = {
        "{right}": True,
        "<think>hm</think>{right}": True,
        "<think>hm</think>\n\n{right}": True,
        # The prompt may end in <think>.
        "hm</think>{right}": True,
        "<think>a</think> b <think>c</think> {right}": True,
        "<think>a <think>b</think> c</think> {right}": True,
        "<think>{right}</think>": False,
        "{right}</think>": False,
        "{right}</think> I do not know": False,
        "<think>{right}": False,
        "{right}<think>wait": False,
        "<think>hm</think>{right}<think>wait": False,
        "{right}<think>wait</think>": False,
    }
    verdicts = {form: compute_score(source, form.format(right=right), truth) for form in forms}
    assert {form: verdict["acc"] for form, verdict in verdicts.items()} == forms
    assert {verdict["reason"] for verdict in verdicts.values()} == {"exact", "missing"}
    assert not any(verdicts[form]["boxed"] for form in forms if not forms[form])


def test_long_answers_are_equal_as_text_alone():
    long = "x+" * 300 + "1"
    for source in ("math", "open_answer"):
        assert compute_score(source, rf"\boxed{{{long}}}", "5")["reason"] == "different"
        assert compute_score(source, rf"\boxed{{{long} }}", long)["reason"] == "exact"
        assert len(compute_score(source, rf"\boxed{{{long}}}", "5")["answer"]) == 200


def test_exponent_beyond_all_limits_is_within_no_tolerance():
    tolerance = Tolerance(extra_info={"tolerance": 0.1, "relative_tolerance": 0.1})
    for value in ("1e999999999999", "-1e999999999999", "1.5e10000000"):
        assert not tolerance.allows(Decimal(value), Decimal("0.5"))
        assert not tolerance.allows(Decimal("0.5"), Decimal(value))
