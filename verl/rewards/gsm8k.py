"""Verifier of GSM8K: the answer is one number, often written with its unit."""

import re
import unicodedata
from collections.abc import Mapping
from typing import Any

from verl.rewards.answers import NUMBER, extract_answer, quick_equal
from verl.rewards.equations import is_name
from verl.rewards.math import verdict_of
from verl.rewards.measures import bases_in, modifiers_in, with_factors
from verl.rewards.notation import SHORT_UNITS, UNITS, keep_variable
from verl.rewards.score import Verdict

MAX_CHARS = 1000
"""Longer answers are compared as mathematics only."""

_WRAPPER = re.compile(
    r"\\(?:text(?:bf|rm|it)?|mathrm|mathbf|mbox)\s{0,3}(?=\{)|\\(?=[$%])|\\[!,;: ()\[\]]|\\(?:left|right)(?![A-Za-z])"
)
_BEFORE = re.compile(r"[A-Za-zÀ-ɏ\u4e00-\u9fff\s$£€¥:,.*_~'\"()\[{}-]*\+?")
_AFTER = re.compile(r"[A-Za-zÀ-ɏ\u4e00-\u9fff\s$£€¥:,.*_~'\")\]}{%°/?(-]*!?")
_HYPHEN = re.compile(r"(?<![A-Za-z0-9])-|-(?![A-Za-z])")
_LETTERS = re.compile(r"[A-Za-z]+")
_SINGLE = re.compile(r"(?<![A-Za-z'])(?![aAI]\s+[A-Za-z])[A-Za-z](?![A-Za-z'])")
"""A letter that is no word."""

_CHANGING = re.compile(r"[万亿千百倍负不非半]")


def verify_gsm8k(
    solution: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None, quick: bool = False
) -> Verdict | None:
    """The verdict on a response; with ``quick``, None if it needs algebra. ``extra_info`` is not used.

    An answer with text around its only number, as in ``18 dollars``, counts as that number.
    """
    answer, boxed = extract_answer(solution, equation="=" in ground_truth)
    if answer is None:
        return Verdict(False, boxed, "missing")
    equal = quick_equal(answer, ground_truth)
    if equal is None:
        if bases_in(answer) or modifiers_in(answer) != modifiers_in(ground_truth):
            equal = False
        else:
            number = _only_number(answer)
            equal = None if number is None else quick_equal(number, ground_truth)
    return verdict_of(answer, boxed, ground_truth, equal, quick)


def _only_number(answer: str) -> str | None:
    """The only number of an answer, if what is around it is a name, currency and words: ``x = $18``, ``18 dollars``.

    Not ``18x``, ``18 million``, ``-(18)``, nor with any sign that might be part of a formula.
    """
    if len(answer) > MAX_CHARS:
        return None
    # Ticks and faces say nothing.
    text = "".join(sign for sign in _WRAPPER.sub("", answer) if unicodedata.category(sign) not in ("So", "Mn"))
    numbers = list(NUMBER.finditer(text))
    if len(numbers) != 1 or with_factors(answer) != answer or with_factors(text) != text or _CHANGING.search(text):
        return None
    before, after = text[: numbers[0].start()], text[numbers[0].end() :]
    name, is_equation, before = before.rpartition("=")
    if is_equation and name.strip() and not is_name(name):
        return None
    if not _BEFORE.fullmatch(before) or not _AFTER.fullmatch(after) or after.startswith("!"):
        return None
    # A hyphen joins words; any other is a minus.
    if _HYPHEN.search(before) or _HYPHEN.search(after[1:] if re.match("-[A-Za-z]", after) else after):
        return None
    if before[-1:].isalpha() or _SINGLE.search(before):
        return None
    if _keeps_variable(after):
        return None
    return numbers[0].group().replace(",", "")


def _keeps_variable(after: str) -> bool:
    """Whether what follows a number multiplies it: ``18x``, ``18k``, but not ``18 m``, ``18 a day``."""
    words = _LETTERS.findall(after)
    if any(len(word) == 1 and word.lower() not in {"a", *SHORT_UNITS} for word in words):
        return True
    attached = _LETTERS.match(after)
    if attached and len(attached.group()) <= 2 and attached.group().lower() not in UNITS:
        return True
    # The last of several words is one.
    return len(words) == 1 and keep_variable(f"1{after.rstrip(' .')}", short=True) != f"1{after.rstrip(' .')}"
