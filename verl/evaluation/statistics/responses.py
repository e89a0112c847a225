"""Statistics of responses: how much they repeat themselves, and their rank metrics by correctness."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from verl.evaluation.results import ProblemResult, metric_names

REPEATED_WORDS = 4
"""Length of the word sequences whose repetition is counted."""

GROUPS = ("all", "correct", "wrong")
"""The responses over which rank metrics are summarised."""

_WORD = re.compile(r"[^\W\u3040-\u30ff\u3400-\u9fff]+|\S")


@dataclass(frozen=True)
class Spread:
    """A rank metric over some responses; NaN if there are none."""

    count: int
    mean: float
    quartiles: tuple[float, float, float]


def repetition_rate(text: str, length: int = REPEATED_WORDS) -> float:
    """Share of the sequences of ``length`` words that occurred before in ``text``; 0 for a shorter text.

    A word is a run of letters and digits, a punctuation mark, or a Chinese or Japanese character.
    """
    words = _WORD.findall(text)
    sequences = len(words) - length + 1
    if sequences < 1:
        return 0.0
    return 1 - len(set(zip(*(words[i:] for i in range(length)), strict=False))) / sequences


def metric_spreads(problems: Sequence[ProblemResult]) -> dict[str, dict[str, Spread]]:
    """Every rank metric's finite values over all, correct and wrong responses."""
    spreads = {}
    for name in metric_names(problems):
        found = [(s.metrics.get(name, math.nan), s.correct) for p in problems for s in p.samples]
        finite = [(value, correct) for value, correct in found if math.isfinite(value)]
        groups = ({True, False}, {True}, {False})
        spreads[name] = {
            group: _spread([value for value, correct in finite if correct in members])
            for group, members in zip(GROUPS, groups, strict=True)
        }
    return spreads


def _spread(values: list[float]) -> Spread:
    if not values:
        return Spread(0, math.nan, (math.nan,) * 3)
    ordered = sorted(values)
    # The nearest rank is exact enough for a spread.
    low, middle, high = (ordered[round(q * (len(ordered) - 1))] for q in (0.25, 0.5, 0.75))
    return Spread(len(values), fmean(values), (low, middle, high))
