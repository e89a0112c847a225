"""The verdict of a verifier on a response, and the score that follows from it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict, get_args

from verl.config.checks import require_choice
from verl.config.rewards import ScoreMode

MAX_LOGGED_ANSWER = 200
"""Maximum number of characters of an answer in a score."""


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


class Score(TypedDict):
    """The score of one response, in veRL's convention for reward functions."""

    score: float
    correctness: bool
    boxed: bool
    reason: str
    answer: str
    reward_extra_info: dict[str, Any]


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


def score_of(verdict: Verdict, mode: str) -> Score:
    """The score of ``verdict``: its own, or by ``mode`` as in ``RewardScoreConfig.mode``.

    Raises ``ConfigError`` for another mode.
    """
    require_choice("mode", mode, get_args(ScoreMode))
    if verdict.score is not None:
        value = verdict.score
    elif mode == "partial" and verdict.share is not None:
        value = verdict.share
    elif mode in ("mix", "partial"):
        value = 1.0 if verdict.correct else 0.0
    elif verdict.correct:
        value = 1.0 if verdict.boxed else 0.5
    else:
        value = -0.5 if verdict.boxed else -1.0
    answer = verdict.answer[:MAX_LOGGED_ANSWER]
    return Score(
        score=value,
        correctness=verdict.correct,
        boxed=verdict.boxed,
        reason=verdict.reason,
        answer=answer,
        reward_extra_info=dict(verdict.extras),
    )
