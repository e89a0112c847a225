"""The score that follows from a verdict."""

from typing import Any, TypedDict, get_args

from verl.config.checks import require_choice
from verl.config.rewards import ScoreMode
from verl.verifiers.verdict import Verdict

MAX_LOGGED_ANSWER = 200
"""Maximum number of characters of an answer in a score."""


class Score(TypedDict):
    """The score of one response, in veRL's convention for reward functions."""

    score: float
    correctness: bool
    boxed: bool
    reason: str
    answer: str
    reward_extra_info: dict[str, Any]


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
