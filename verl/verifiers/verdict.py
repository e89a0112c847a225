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
    """None until it follows from ``correct`` and ``boxed`` (``verl.rewards.score``); a custom function sets it."""
    extras: Mapping[str, Any] = field(default_factory=dict)
    """Further values that a custom function returned (``verl.rewards.custom``) or a verifier counted."""
    share: float | None = None
    """Share of its tests that a program passed; None for other responses."""

    def as_dict(self) -> dict[str, Any]:
        """Return the verdict in veRL's convention for results of reward functions."""
        return {
            "score": self.score,
            "correctness": self.correct,
            "boxed": self.boxed,
            "reason": self.reason,
            "answer": self.answer,
            "reward_extra_info": dict(self.extras),
        }

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "Verdict":
        """Return the verdict that :meth:`as_dict` returned."""
        correct, boxed, reason, answer = (saved[name] for name in ("correctness", "boxed", "reason", "answer"))
        return cls(correct, boxed, reason, answer, saved["score"], saved["reward_extra_info"])


REASONS = {True: "equivalent", False: "different", None: "unparsed"}
"""Result of algebra -> the reason of the verdict; None if it cannot parse the answer."""


def decide(
    answer: str | None,
    boxed: bool,
    equal: bool | None,
    quick: bool = False,
    algebra: Callable[[str], bool | None] = lambda answer: None,
) -> Verdict | None:
    """Return the verdict on an answer whose quick comparison gave ``equal``; None if that is None and must be quick.

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
