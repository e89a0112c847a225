"""The result type of verifiers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Info = Mapping[str, Any] | None
"""A record's ``extra_info``, or None."""


@dataclass(frozen=True)
class Verdict:
    """Result of verifying a response."""

    correct: bool
    boxed: bool
    """Whether the response has a closed, non-empty ``\\boxed{...}``, or another form required by its verifier."""
    reason: str
    """``exact`` or ``equivalent`` if correct, otherwise ``different``, ``missing`` (no answer), ``unparsed`` (algebra
    cannot parse the answer), ``timeout``, ``memory`` or ``crash``. Custom functions have the reasons ``custom``,
    ``error`` (exception or no score), and ``inapplicable`` (None as part of a sum)."""
    answer: str = ""
    """Answer extracted from the response."""
    score: float | None = None
    """Score from a custom function, or None until ``verl.rewards.score`` computes it from ``correct`` and ``boxed``."""
    extras: Mapping[str, Any] = field(default_factory=dict)
    """Additional values from a custom function (``verl.rewards.custom``) or a verifier."""
    share: float | None = None
    """Fraction of tests that a program passed, or None for other kinds of responses."""
    stated: bool = field(default=False, compare=False)
    """Whether a custom function set ``correct`` through an explicit key of its result, such as ``acc``."""
    failed: bool = field(default=False, compare=False)
    """Whether a custom function failed, in which case the response scores 0 regardless of other functions."""

    def as_dict(self) -> dict[str, Any]:
        """Return the verdict as a dictionary with veRL's keys for reward function results."""
        return {
            "score": self.score,
            "acc": self.correct,
            "boxed": self.boxed,
            "reason": self.reason,
            "answer": self.answer,
            "reward_extra_info": dict(self.extras),
        }

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "Verdict":
        """Restore a verdict from the output of :meth:`as_dict`. Earlier versions named ``acc`` ``correctness``."""
        correct = saved["acc"] if "acc" in saved else saved["correctness"]
        boxed, reason, answer = (saved[name] for name in ("boxed", "reason", "answer"))
        extras = saved["reward_extra_info"]
        return cls(correct, boxed, reason, answer, saved["score"], extras, stated=saved.get("stated", False))


REASONS = {True: "equivalent", False: "different", None: "unparsed"}
"""Maps the result of the algebraic comparison (None for an unparsable answer) to the verdict's reason."""


def decide(
    answer: str | None,
    boxed: bool,
    equal: bool | None,
    quick: bool = False,
    algebra: Callable[[str], bool | None] = lambda answer: None,
) -> Verdict | None:
    """Return the verdict on an answer, or None if ``quick`` is set and algebra is required.

    Args:
        answer: answer in the response, or None if there is none.
        equal: result of a quick comparison with the ground truth, or None if undecided.
        algebra: function that compares an answer with the ground truth algebraically. It is used if ``equal`` is None.
    """
    if answer is None:
        return Verdict(False, boxed, "missing")
    if equal is not None:
        return Verdict(equal, boxed, "exact" if equal else "different", answer)
    if quick:
        return None
    equal = algebra(answer)
    return Verdict(equal is True, boxed, REASONS[equal], answer)
