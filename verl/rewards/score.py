"""Conversion of verdicts to scores."""

from dataclasses import replace
from typing import get_args

from verl.config.checks import require_choice
from verl.config.rewards import ScoreMode
from verl.verifiers.verdict import Verdict

MAX_LOGGED_ANSWER = 200
"""Maximum length of a stored answer in characters."""


def with_score(verdict: Verdict, mode: str) -> Verdict:
    """Add a score according to ``mode`` (``RewardScoreConfig.mode``); keep any score that a custom function has set.

    Raises ``ConfigError`` for an unknown mode.
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
    return replace(verdict, score=value, answer=verdict.answer[:MAX_LOGGED_ANSWER])
