"""Responses that try to break, stall or fool the verifiers: each costs at most its own score."""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import scoring
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.rewards.pool import VerifierPool
from verl.rewards.registry import VERIFIERS, Job, find_scorer
from verl.verifiers.answers import extract_answer, quick_equal


def text_of(value: Any) -> str:
    """A text of ``hostile.yaml``: a string, a list of texts, or ``[text, times]``."""
    if isinstance(value, str):
        return value
    if isinstance(value[-1], int):
        return text_of(value[0]) * value[1]
    return "".join(map(text_of, value))


TABLES = yaml.safe_load(Path(__file__).with_name("hostile.yaml").read_text("utf-8"))
TRUTHS, RIGHT, TEXTS, BOMBS, RESPONSES = (
    {name: text_of(value) for name, value in TABLES[table].items()}
    for table in ("truths", "right", "texts", "bombs", "responses")
)
BOMBS["set of intervals"] = r"\cup".join(f"[{i},{i + 1})" for i in range(45))
BOMBS["many variables"] = "+".join(f"{a}_{b}" for a in "abcdefghij" for b in "0123456789")[:399]
THOUGHTS = " ".join(RIGHT.values()).replace("</think>", "")
RESPONSES["a thought with a right answer"] = f"<think>{THOUGHTS}</think>"
RESPONSES["a thought that goes on"] = "</think><think>" * 10**5 + THOUGHTS

WITH_ALGEBRA = ["math", "gsm8k", "open_answer", "multiple_choice", "deepseek_r1"]

READ = {"different", "missing", "unparsed"}
"""Reasons for which a response is wrong that was read to its end."""

OPTIONS = {"options": ["16", r"\frac{17}{2}", "18"]}


def new_pool(timeout_s: float) -> VerifierPool:
    return VerifierPool(scoring(mode="mix", num_workers=2, timeout_s=timeout_s, memory_limit_mb=512))


def reasons_of_wrong(pool: VerifierPool, source: str, responses: Mapping[str, str]) -> dict[str, str]:
    """Name -> reason of the verdict on each response, all of which must be wrong; a right one must still be right."""
    n = len(responses)
    scores = pool.score_batch([source] * n, list(responses.values()), [TRUTHS[source]] * n, [OPTIONS] * n)
    assert [name for name, score in zip(responses, scores, strict=True) if score.correct] == []
    after = pool.score_batch([source], [RIGHT[source]], [TRUTHS[source]], [OPTIONS])[0]
    assert after.correct and after.reason == ("equivalent" if source in WITH_ALGEBRA else "exact")
    return {name: score.reason for name, score in zip(responses, scores, strict=True)}


def wrapped(source: str, answer: str) -> str:
    """A response of the form that the verifier of ``source`` reads first."""
    if source in ("deepseek_r1", "kk", "countdown", "search_r1"):
        return f"<think>so</think> <answer>{answer}</answer>"
    return rf"so \boxed{{{answer}}}"


def test_every_verifier_is_attacked():
    # The scorers of reasoning-gym come with that package; tests/data/test_reasoning_gym.py attacks what is ours.
    others = {VERIFIERS["reasoning_gym/*"]}
    assert {find_scorer(source).path for source in TRUTHS} == set(VERIFIERS.values()) - others
    assert TRUTHS.keys() == RIGHT.keys()


@pytest.fixture(scope="module")
def patient_pool() -> Iterator[VerifierPool]:
    with new_pool(timeout_s=60.0) as pool:
        yield pool


@pytest.fixture(scope="module")
def impatient_pool() -> Iterator[VerifierPool]:
    with new_pool(timeout_s=4.0) as pool:
        yield pool


@pytest.mark.slow
@pytest.mark.parametrize("source", TRUTHS)
def test_hostile_texts_are_read_to_their_end(patient_pool: VerifierPool, source: str):
    responses = {name: wrapped(source, text) for name, text in TEXTS.items()}
    responses |= {f"{name}, bare": text for name, text in TEXTS.items()} | RESPONSES
    reasons = reasons_of_wrong(patient_pool, source, responses)
    # Neither the time nor the memory limit is needed.
    assert {name: reason for name, reason in reasons.items() if reason not in READ} == {}


@pytest.mark.slow
@pytest.mark.parametrize("source", sorted(TRUTHS.keys() - WITH_ALGEBRA))
def test_algebra_bombs_are_text_where_there_is_no_algebra(patient_pool: VerifierPool, source: str):
    reasons = reasons_of_wrong(patient_pool, source, {name: wrapped(source, bomb) for name, bomb in BOMBS.items()})
    assert set(reasons.values()) <= READ


ENDLESS = {"power tower", "tall tower", "factorial tower"}
"""Bombs that end on no machine; how many others do within the limit depends on the machine."""

SOME_BOMBS = ["power tower", "tall tower", "factorial tower", "huge sum"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "names"),
    [
        # All score by the same algebra.
        ("math", SOME_BOMBS),
        *((source, SOME_BOMBS[:1]) for source in WITH_ALGEBRA if source != "math"),
        *(pytest.param(source, list(BOMBS), marks=pytest.mark.nightly) for source in WITH_ALGEBRA),
    ],
)
def test_algebra_bombs_cost_only_themselves(impatient_pool: VerifierPool, source: str, names: list[str]):
    reasons = reasons_of_wrong(impatient_pool, source, {name: wrapped(source, BOMBS[name]) for name in names})
    assert set(reasons.values()) <= READ | {"timeout", "memory", "crash"}
    assert {reasons[name] for name in names if name in ENDLESS} == {"timeout"}


ALPHABET = "\\{}$^_#*()<>/.,:;=+-! \n\t0123456789ABCab\u0661\u200b\u202e\ud800\x00"
FRAGMENTS = (
    r"\boxed{|\text{|\frac|<think>|</think>|<answer>|</answer>|####|answer is|Answer:|答案是|CONCLUSION:|Alice|Bob"
    "| is a |knight|knave|not |(A)|B.| and |1,000|0.5"
).split("|")
ANY_TEXT = st.text(st.characters(), max_size=60)  # surrogates included: the pool transports them
HOSTILE_TEXT = st.lists(
    st.one_of(st.sampled_from(FRAGMENTS), st.text(ALPHABET, max_size=8), st.text(st.characters(), max_size=3)),
    max_size=20,
).map("".join)


@settings(max_examples=200, deadline=None)
@given(st.one_of(ANY_TEXT, HOSTILE_TEXT))
def test_any_text_has_a_verdict(text: str):
    for source, truth in TRUTHS.items():
        for response in (text, wrapped(source, text)):
            verdict = Job(find_scorer(source), source, response, truth, OPTIONS).verdict(quick=True)
            assert verdict is None or verdict.reason in ("exact", "different", "missing", "unparsed")
            assert verdict is None or verdict.correct == (verdict.reason == "exact")


@pytest.mark.parametrize(
    "fragment", ["\\boxed{", "{", "}", "\\boxed{}", "\\boxed    ", "####", "answer is ", " ", "1,", "9", "\\", "$"]
)
def test_time_is_linear(fragment: str):
    text = fragment * (2_000_000 // len(fragment))
    start = time.perf_counter()
    extract_answer(text)
    quick_equal(text, "5")
    # A quadratic scan of two million characters takes hours; the bound only has to tell these apart.
    assert time.perf_counter() - start < 10
