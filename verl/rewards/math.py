"""Verifier of mathematical answers: equal text, equal numbers, or the same expression by math-verify.

Run it in a ``VerifierPool``: sympy has no time limit of its own here, and an answer like ``10^{10^{10}}`` never ends.
"""

import logging
from collections.abc import Mapping
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

from verl.rewards.answers import extract_answer, quick_equal
from verl.rewards.score import Verdict

# It warns once a process that its own time limit is off. That limit needs SIGALRM in the main thread and does not
# interrupt long C calls; the pool's does.
logging.getLogger("math_verify").setLevel(logging.ERROR)

_LATEX = [LatexExtractionConfig()]


def verify_math(
    solution: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None, quick: bool = False
) -> Verdict | None:
    """The verdict on a response; with ``quick`` None where deciding needs algebra. ``extra_info`` is not used."""
    answer, boxed = extract_answer(solution)
    if answer is None:
        return Verdict(False, boxed, "missing")
    return judge(answer, boxed, ground_truth, quick_equal(answer, ground_truth), quick)


def judge(answer: str, boxed: bool, ground_truth: str, equal: bool | None, quick: bool) -> Verdict | None:
    """The verdict on an answer whose quick comparison gave ``equal``; where that is None, algebra decides."""
    if equal is not None:
        return Verdict(equal, boxed, "exact" if equal else "different", answer)
    if quick:
        return None
    equal = equivalent(answer, ground_truth)
    return Verdict(equal, boxed, "equivalent" if equal else "different", answer)


def equivalent(answer: str, ground_truth: str) -> bool:
    """Whether two LaTeX expressions mean the same; False where one of them cannot be read. May take for ever."""
    same: bool = verify(_parse(ground_truth), _parse(answer), timeout_seconds=None)
    return same


def _parse(latex: str) -> list[Any]:
    expressions: list[Any] = parse(f"${latex.replace('$', '')}$", extraction_config=_LATEX, parsing_timeout=None)
    return expressions
