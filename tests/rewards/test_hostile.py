"""Responses that try to break, stall or fool the verifiers: each costs at most its own score."""

from collections.abc import Iterator, Mapping

import pytest
from conftest import scoring
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.rewards.pool import VerifierPool
from verl.rewards.registry import VERIFIERS, find_scorer, quick_verdict

TRUTHS = {
    "arithmetic": "17",
    "gsm8k": "17",
    "math": r"\frac{17}{2}",
    "open_answer": r"\frac{17}{2} \text{ cm}",
    "multiple_choice": "B",
    "deepseek_r1": r"\frac{17}{2}",
    "kk": "(1) Alice is a knight\n(2) Bob is a knave",
    "countdown": '{"target": 17, "numbers": [3, 5, 2]}',
}
"""One data source of every verifier -> a ground truth."""

WITH_ALGEBRA = ["math", "gsm8k", "open_answer", "multiple_choice", "deepseek_r1"]

READ = {"different", "missing", "unparsed"}
"""Reasons for which a response is wrong that was read to its end."""

OPTIONS = {"options": ["16", r"\frac{17}{2}", "18"]}

RIGHT = {
    "arithmetic": r"\boxed{17}",
    "gsm8k": r"\boxed{\frac{34}{2}}",
    "math": r"\boxed{\frac{34}{4}}",
    "open_answer": r"\boxed{\frac{34}{4}\text{ cm}}",
    "multiple_choice": r"\boxed{\frac{34}{4}}",
    "deepseek_r1": r"<think>so</think> <answer>\frac{34}{4}</answer>",
    "kk": "<answer>(1) Alice is a knight (2) Bob is a knave</answer>",
    "countdown": "<answer>3 * 5 + 2</answer>",
}
"""A right response to each; where a verifier knows algebra, one that needs it."""

MEGABYTE = 1_000_000
LONG = 200_000
"""Characters at which a quadratic scan takes minutes and a linear one milliseconds."""

TEXTS = {
    "nested braces": "{" * 10**5 + "5" + "}" * 10**5,
    "nested fractions": r"\frac{" * 10**5 + "1" + "}{2}" * 10**5,
    "nested roots, far": r"\sqrt{" * 10**5 + "2" + "}" * 10**5,
    "megabyte of digits": "9" * MEGABYTE,
    "many decimals": "0." + "3" * LONG,
    "many separators": "1,000" + ",000" * (LONG // 4),
    "many terms": "x+" * (LONG // 2) + "1",
    "megabyte of letters": "A, B, " * (MEGABYTE // 6),
    "many labels": "A) 1 B) 2 " * (LONG // 10),
    "many blanks": " " * LONG + "x",
    "letters and a mark": "(A)," * 45 + "!",
    "a number and blanks": "5" + " " * LONG + "x",
    "a number and ties": "5" + "~" * LONG + "x",
    "many people": "Alice, Bob, " * (LONG // 12) + "knight knave " * 1000,
    "ungrouped braces": "}{" * 10**5,
    "unclosed": "{" * 10**5,
    "backslashes": "\\" * 10**5,
    "null bytes": "\x00" * 1000,
    "null byte in a number": "1\x007",
    "lone surrogates": "\ud800\udfff71",
    "right to left": "\u202e71\u202c",
    "bidi isolates": "\u2067\u206617\u2069\u2069 18",
    "zero-width number": "1\u200b7\ufeff",
    "zero-width letter": "\u200bA\u200d",
    "Arabic digits": "\u0661\u0667",
    "superscript digits": "\u00b9\u2077",
    "mathematical digits": "\U0001d7cf\U0001d7d5" * 1000,
    "full-width": "\uff11\uff17\uff08\uff21\uff09",
    "combining marks": "1" + "\u0301" * 10**5,
    "code": "__import__('os').kill(1, 9)",
    "macro": r"\def\a{\a\a}\a",
    "format string": "{0.__class__}%s%n",
}
"""Name -> wrong answer to every question of ``TRUTHS``, hard to read or to compare."""

BOMBS = {
    "power tower": "10^{10^{10}}",
    "power tower in Python": "9**9**9**9",
    "tall tower": "9^{9^{9^{9^{9}}}}",
    "huge integer power": "7^{123456789}",
    "tiny power": "10^{-999999999}",
    "factorial tower": "((((9!)!)!)!)!",
    "factorial": "(10^9)!",
    "binomial": r"\binom{10^9}{5\cdot10^8}",
    "huge sum": r"\sum_{i=1}^{10^{9}} \frac{1}{i^3+\sin i}",
    "huge product": r"\prod_{i=1}^{10^{9}} (i^2+1)",
    "integral": r"\int_0^1 \sin(\sin(\sin(x^x))) e^{x^x} dx",
    "limit": r"\lim_{x \to 0} \frac{\sin(\tan(x))-\tan(\sin(x))}{x^{77}}",
    "expansion": "(a+b+c+d+e+f+g)^{60}",
    "big matrix": r"\begin{pmatrix}" + r" \\ ".join(["1&2&3&4&5&6&7&8&9"] * 9) + r"\end{pmatrix}^{99}",
    "nested roots": r"\sqrt{2+" * 40 + "2" + "}" * 40,
    "parentheses": "(" * 180 + "5" + ")" * 180,
    "minus signs": "-" * 390 + "17",
    "plus-minus signs": r"\pm 1" * 40,
    "set of intervals": r"\cup".join(f"[{i},{i + 1})" for i in range(45)),
    "tuple": "(" + ",".join(["x"] * 190) + ")",
    "chain of equations": "=".join(["x"] * 190),
    "many variables": "+".join(f"{a}_{b}" for a in "abcdefghij" for b in "0123456789")[:399],
    "exponent digits": "1e999999999",
    "repeating decimal": r"0.\overline{" + "7" * 380 + "}",
    "modulus": r"7^{10^{18}} \bmod 10^{18}",
    "trigonometric": r"\sin(" * 45 + "x" + ")" * 45,
}
"""Name -> wrong answer on which algebra may take for ever."""

RESPONSES = {
    "empty": "",
    "blank": " \n" * (LONG // 2),
    "many boxes": r"\boxed{5}" * 10**5,
    "nested boxes": r"\boxed{" * 10**5 + "5" + "}" * 10**5,
    "unclosed boxes": r"\boxed{" * 10**5,
    "almost boxes": r"\boxed" + " " * LONG,
    "many almost boxes": (r"\boxed" + " " * 999) * 999,
    "many answer tags": "<answer>5</answer>" * 10**5,
    "nested answer tags": "<answer>" * 10**5 + "5" + "</answer>" * 10**5,
    "open answer tags": "<answer>" * 10**5,
    "close answer tags": "</answer>" * 10**5,
    "crossed tags": "</answer><answer>" * 10**5,
    "many thoughts": "<think></think>" * 10**5 + "<answer>5</answer>",
    "open thoughts": "<think>" * 10**5,
    "thoughts in thoughts": "<think>" * 10**5 + "</think>" * 10**5,
    "a thought with a right answer": "<think>" + " ".join(RIGHT.values()).replace("</think>", "") + "</think>",
    "a thought that goes on": "</think><think>" * 10**5 + " ".join(RIGHT.values()).replace("</think>", ""),
    "hashes": "#" * LONG,
    "hashes and blanks": ("####" + " " * 9999) * 99,
    "hashes and separators": "#### 1" + ",,,," * (LONG // 4) + "x",
    "answers": "answer is " * (LONG // 10),
    "answers and blanks": ("answer" + " " * 200) * 999,
    "answers and stars": "answer" + "*" * LONG,
    "options": "option: the the the the " * 9999,
    "wide answers": "答案是" * 10**5,
    "conclusions": "CONCLUSION:" * 10**5,
    "almost conclusions": "conclusion" + " *" * LONG,
    "many almost conclusions": ("conclusion" + " *" * 500) * 999,
    "separated numbers": "1," * (LONG // 2),
    "numbers with points": "1." * (LONG // 2),
    "negations": "Alice is " + "not " * (LONG // 4) + "a",
    "names": "Alice and " * (LONG // 10),
    "roles": "Alice, Bob: " + "knight or knave " * (LONG // 16),
    "letters": "A " * (LONG // 2) + "?",
    "letters in brackets": "(A" * (LONG // 2),
    "letters and blanks": "(A)" + " " * LONG + "is" + " " * LONG,
    "fractions": r"\frac" * (LONG // 5),
    "almost text": r"\boxed{\text" + " " * LONG + "{5}",
    "dollars": "$" * LONG,
    "full stops": "answer:" + "." * LONG,
}
"""Name -> response that is wrong for every question of ``TRUTHS``; most are what a regular expression of
``verl.rewards`` would choke on if it backtracked."""


def new_pool(timeout_s: float) -> VerifierPool:
    return VerifierPool(scoring(mode="mix", num_workers=2, timeout_s=timeout_s, memory_limit_mb=512))


def reasons_of_wrong(pool: VerifierPool, source: str, responses: Mapping[str, str]) -> dict[str, str]:
    """Name -> reason of the verdict on each response, all of which must be wrong; a right one must still be right."""
    n = len(responses)
    scores = pool.score_batch([source] * n, list(responses.values()), [TRUTHS[source]] * n, [OPTIONS] * n)
    assert [name for name, score in zip(responses, scores, strict=True) if score["correctness"]] == []
    after = pool.score_batch([source], [RIGHT[source]], [TRUTHS[source]], [OPTIONS])[0]
    assert after["correctness"] and after["reason"] == ("equivalent" if source in WITH_ALGEBRA else "exact")
    return {name: score["reason"] for name, score in zip(responses, scores, strict=True)}


def wrapped(source: str, answer: str) -> str:
    """A response of the form that the verifier of ``source`` reads first."""
    if source in ("deepseek_r1", "kk", "countdown"):
        return f"<think>so</think> <answer>{answer}</answer>"
    return rf"so \boxed{{{answer}}}"


def test_every_verifier_is_attacked():
    assert {find_scorer(source).path for source in TRUTHS} == set(VERIFIERS.values())
    assert TRUTHS.keys() == RIGHT.keys()


@pytest.fixture(scope="module")
def patient_pool() -> Iterator[VerifierPool]:
    with new_pool(timeout_s=20.0) as pool:
        yield pool


@pytest.fixture(scope="module")
def impatient_pool() -> Iterator[VerifierPool]:
    with new_pool(timeout_s=2.0) as pool:
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
            verdict = quick_verdict(find_scorer(source), source, response, truth, OPTIONS)
            assert verdict is None or verdict.reason in ("exact", "different", "missing", "unparsed")
            assert verdict is None or verdict.correct == (verdict.reason == "exact")
