"""Random answers to every verifier, through its algebra: no exception, and never right for two different truths."""

from collections.abc import Iterable, Iterator

import pytest
from conftest import scoring
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzzing import QUIET
from verl.rewards.pool import VerifierPool

NUMBERS = ["5", "-5", r"\frac{5}{2}", r"5\times 10^{-19}", "x=6", r"\{5, 6\}", "5x", "1010_2"]
TRUTHS = {
    "arithmetic": ["5", "-5", "6"],
    "gsm8k": ["5", "-5", "6", "2.5"],
    "math": NUMBERS,
    # One length alone: an answer without a unit, a bare 7, is right for each of them.
    "open_answer": [*NUMBERS, r"7\text{ km}", "5 million"],
    "multiple_choice": ["A", "B", "AB"],
    "deepseek_r1": NUMBERS[:4],
    "kk": [
        "Alice is a knight, Bob is a knave",
        "Alice is a knave, Bob is a knave",
        "Alice is a knight, Bob is a knight",
    ],
    "search_r1": ["5", "6", "Alice is a knight"],
    "countdown": ['{"target": 5, "numbers": [2, 3]}', '{"target": 6, "numbers": [2, 3]}'],
}
"""Data source -> truths of which an answer can be only one."""

PARTS = (
    r"5|6|7|-|−| - |+|x|x^2|x_1|=|\neq|<|\in|,|;|(|)|[|]|\{|\}|{|}|$|!|^|_2|_3|{,}|.|0.|\frac{|}{|\sqrt|√|²|π|½|\pi|i"
    r"|\infty|10^{-19}|10^{-17}|\times |\cdot |/|\%|\text{|\text{ m}|\text{ km}|\text{ million}|million|not "
    r"|\mathrm{|e|\ln "
    r"|\text{0}|\mathbf{x}|\text{ tenths}| halves| dollars| hours|'|^\circ|_{16}|√\boxed{|-\boxed{|2\boxed{"
    r"| is wrong|false|none|either |X"
    r"|\begin{pmatrix}|\end{pmatrix}|\\|&|\cup|\emptyset|\left|\right|\log_2 |\sum_{n=1}^{5} |\int_0^1 |\lim_{x\to 0} "
    r"|\sin |\pm|f(x)|A|B|(A)|B. | and | or |Alice|Bob| is a |knight|knave|2*3|2+3| |\boxed{|answer is |####|x=5|2x=10"
).split("|")
ANSWERS = st.lists(st.one_of(st.sampled_from(PARTS), st.text(max_size=2)), min_size=1, max_size=10).map("".join)
FORMS = st.sampled_from([r"so \boxed{%s}", "<think>so</think> <answer>%s</answer>", "The answer is %s", "%s"])


@pytest.fixture(scope="module")
def pool() -> Iterator[VerifierPool]:
    with VerifierPool(scoring(mode="mix", num_workers=2, timeout_s=3.0, memory_limit_mb=512)) as pool:
        yield pool


def attack(pool: VerifierPool, answers: list[str], form: str, sources: Iterable[str] = tuple(TRUTHS)) -> None:
    cases = [
        (source, form.replace("%s", answer), truth)
        for answer in answers
        for source in sources
        for truth in TRUTHS[source]
    ]
    columns = [list(column) for column in zip(*cases, strict=True)]
    # Raises what a verifier raises; the pool stops one that takes longer than its limit.
    scores = pool.score_batch(*columns, [{"options": ["5", "6"]}] * len(cases))
    right: dict[tuple[str, str], set[str]] = {}
    for (source, response, truth), score in zip(cases, scores, strict=True):
        if score.correct:
            right.setdefault((source, response), set()).add(truth)
    assert {case: truths for case, truths in right.items() if len(truths) > 1} == {}


@pytest.mark.slow
@settings(max_examples=10, derandomize=True, **QUIET)
@given(st.lists(ANSWERS, min_size=4, max_size=4), FORMS)
def test_random_answers(pool: VerifierPool, answers: list[str], form: str):
    attack(pool, answers, form)


@pytest.mark.nightly
@pytest.mark.parametrize("source", TRUTHS)
@settings(max_examples=400, **QUIET)
@given(st.lists(ANSWERS, min_size=4, max_size=4), FORMS)
def test_many_random_answers(pool: VerifierPool, source: str, answers: list[str], form: str):
    attack(pool, answers, form, [source])
