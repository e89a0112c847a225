"""The verdict of a verifier on a response."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Verdict:
    """A verifier's result for one response."""

    correct: bool
    boxed: bool
    """Whether the response has a closed, non-empty ``\\boxed{...}``, or the form that its verifier requires instead."""
    reason: str
    """``exact`` or ``equivalent`` (correct); ``different``, ``missing`` (no answer found), ``unparsed`` (algebra cannot
    parse the answer), ``timeout``, ``memory``, ``crash`` (the verifier crashed); ``custom`` (a user's function
    decided); ``error`` (it raised, or returned no score)."""
    answer: str = ""
    """The answer found in the response."""
    score: float | None = None
    """The score if a user's function set it; None if it follows from ``correct`` and ``boxed``."""
    extras: Mapping[str, Any] = field(default_factory=dict)
    """What else a user's function returned (``verl.rewards.custom``), or a verifier counted."""
    share: float | None = None
    """Share of its tests that a program passed; None for other responses."""


REASONS = {True: "equivalent", False: "different", None: "unparsed"}
"""What algebra found -> the reason of the verdict; None if it cannot parse the answer."""


def decide(
    answer: str | None,
    boxed: bool,
    equal: bool | None,
    quick: bool = False,
    algebra: Callable[[str], bool | None] = lambda answer: None,
) -> Verdict | None:
    """The verdict on an answer whose quick comparison gave ``equal``; None if that is None and must be quick.

    Args:
        answer: None if the response has none.
        algebra: compares the answer with the ground truth, however long that takes.
    """
    if answer is None:
        return Verdict(False, boxed, "missing")
    if equal is not None:
        return Verdict(equal, boxed, "exact" if equal else "different", answer)
    if quick:
        return None
    equal = algebra(answer)
    return Verdict(equal is True, boxed, REASONS[equal], answer)
