"""What verifiers say about a response, and the score that follows from it."""

from dataclasses import dataclass
from typing import TypedDict, get_args

from verl.config.checks import require_choice
from verl.config.signal import ScoreMode

MAX_LOGGED_ANSWER = 200
"""Characters of an answer that a score keeps."""


@dataclass(frozen=True)
class Verdict:
    """A verifier's finding on one response."""

    correct: bool
    boxed: bool
    """Whether the response holds a closed, non-empty ``\\boxed{...}``, or the form its verifier asks for instead."""
    reason: str
    """``exact`` or ``equivalent`` (correct); ``different``, ``missing`` (no answer found), ``unparsed`` (algebra cannot
    read the answer), ``timeout``, ``memory``, ``crash`` (the verifier did not survive the response); ``custom`` (a
    user's function judged)."""
    answer: str = ""
    """The answer found in the response."""
    score: float | None = None
    """The score where a user's function gives it; None where it follows from ``correct`` and ``boxed``."""


class Score(TypedDict):
    """The score of one response, in veRL's convention for reward functions."""

    score: float
    correctness: bool
    boxed: bool
    reason: str
    answer: str


def score_of(verdict: Verdict, mode: str) -> Score:
    """The score of ``verdict``; ``mode`` is ``independent`` or ``mix`` as in ``RewardScoreConfig.mode``.

    A score that the verdict holds itself is used as it is.

    Raises ``ConfigError`` for another mode.
    """
    require_choice("mode", mode, get_args(ScoreMode))
    if verdict.score is not None:
        value = verdict.score
    elif mode == "mix":
        value = 1.0 if verdict.correct else 0.0
    elif verdict.correct:
        value = 1.0 if verdict.boxed else 0.5
    else:
        value = -0.5 if verdict.boxed else -1.0
    answer = verdict.answer[:MAX_LOGGED_ANSWER]
    return Score(score=value, correctness=verdict.correct, boxed=verdict.boxed, reason=verdict.reason, answer=answer)
