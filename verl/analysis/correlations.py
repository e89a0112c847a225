"""Correlations of metrics with bootstrap intervals over prompts.

Responses to one prompt are alike, so what is drawn with replacement is prompts, each with all its responses: a
response's weight is the number of times that its prompt was drawn. Ranks are computed again in each draw.

N: responses (or prompts), D: draws.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from verl.evaluation.statistics.bootstrap import LEVEL

Array = NDArray[np.float64]

GROUPS = ("all", "correct", "wrong")
"""Responses over which correlations are computed apart."""

MIN_VALUES = 3
"""Fewer values have no correlation."""

BLOCK = 1 << 22
"""Responses times draws that are computed at once: 32 MiB an array."""


@dataclass(frozen=True)
class Coefficient:
    """A correlation and its percentile interval; NaN where undefined, as with a constant column."""

    value: float
    low: float
    high: float


def draw_weights(prompts: Sequence[int], draws: int, seed: int) -> Array:
    """How often the prompt of each response is drawn: ``[D + 1, N]``, the first row all 1, the data as they are."""
    names, places = np.unique(np.asarray(prompts), return_inverse=True)
    generator = np.random.default_rng(seed)
    counts = generator.multinomial(len(names), np.full(len(names), 1 / len(names)), size=draws)
    weights: Array = np.concatenate([np.ones((1, len(places))), counts[:, places]]).astype(np.float64)
    return weights


def weighted_pearson(x: Array, y: Array, weights: Array) -> Array:
    """Pearson's correlation under each row of ``weights [D, N]`` -> ``[D]``; ``x``, ``y`` are ``[N]`` or ``[D, N]``."""
    total = weights.sum(axis=1, keepdims=True)
    # A column that is constant within a draw has only the rounding of its mean left.
    tiny = [1e-13 * np.abs(values).max(initial=0.0) for values in (x, y)]
    x, y = (values - (weights * values).sum(axis=1, keepdims=True) / total for values in (x, y))
    covariance, x_square, y_square = ((weights * a * b).sum(axis=1) for a, b in ((x, y), (x, x), (y, y)))
    varies = (x_square > total[:, 0] * tiny[0] ** 2) & (y_square > total[:, 0] * tiny[1] ** 2)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(varies, covariance / np.sqrt(x_square * y_square), np.nan)


def weighted_ranks(values: Array, weights: Array) -> Array:
    """Mid-ranks ``[D, N]`` of ``values [N]``, of each draw's sample: equal values share the mean of their places."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    starts = np.concatenate([[True], ordered[1:] != ordered[:-1]])
    ties = np.cumsum(starts) - 1
    up_to = np.cumsum(weights[:, order], axis=1)
    last = np.append(np.flatnonzero(starts)[1:], len(values)) - 1
    ends = up_to[:, last]
    before = np.concatenate([np.zeros((len(weights), 1)), ends[:, :-1]], axis=1)
    ranks = np.empty_like(weights)
    ranks[:, order] = ((before + ends + 1) / 2)[:, ties]
    return ranks


def partial(xy: Array, xz: Array, yz: Array) -> Array:
    """Correlation of x and y with z held fixed, from the three pairwise ones; NaN where z determines x or y."""
    rest = (1 - xz**2) * (1 - yz**2)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(rest > 1e-12, (xy - xz * yz) / np.sqrt(rest), np.nan)


def correlate(
    x: Array, y: Array, length: Array, prompts: Sequence[int], draws: int, seed: int
) -> dict[str, Coefficient]:
    """``pearson``, ``spearman``, and both with ``length`` held fixed, of values ``[N]`` each.

    Rows where one of the three is not finite are left out.
    """
    kept = np.isfinite(x) & np.isfinite(y) & np.isfinite(length)
    names = ("pearson", "spearman", "pearson_partial", "spearman_partial")
    if kept.sum() < MIN_VALUES:
        return dict.fromkeys(names, Coefficient(math.nan, math.nan, math.nan))
    columns = [values[kept].astype(np.float64) for values in (x, y, length)]
    weights = draw_weights(np.asarray(prompts)[kept].tolist(), draws, seed)
    found: dict[str, list[Array]] = {name: [] for name in names}
    size = max(1, BLOCK // int(kept.sum()))
    for start in range(0, len(weights), size):
        block = weights[start : start + size]
        for name, (a, b, c) in {
            "pearson": columns,
            "spearman": [weighted_ranks(values, block) for values in columns],
        }.items():
            ab, ac, bc = (weighted_pearson(one, two, block) for one, two in ((a, b), (a, c), (b, c)))
            found[name].append(ab)
            found[f"{name}_partial"].append(partial(ab, ac, bc))
    several = len(set(np.asarray(prompts)[kept].tolist())) > 1
    return {name: _coefficient(np.concatenate(parts), several) for name, parts in found.items()}


def correlation_table(
    frame: pd.DataFrame, pairs: Sequence[tuple[str, str]], length: str, correct: str | None, draws: int, seed: int
) -> pd.DataFrame:
    """A row for each pair of columns and group of rows of ``frame``.

    Args:
        frame: with a column ``prompt_id``.
        length: the column that is held fixed in partial correlations.
        correct: the column that tells correct from wrong rows; None: no such groups.
    """
    groups = GROUPS if correct is not None else GROUPS[:1]
    rows = []
    for x, y in pairs:
        for group in groups:
            part = frame if group == "all" else frame[frame[correct] == (1.0 if group == "correct" else 0.0)]
            first, second, third = (part[name].to_numpy(dtype=np.float64, na_value=np.nan) for name in (x, y, length))
            found = correlate(first, second, third, part["prompt_id"].tolist(), draws, seed)
            row = {"x": x, "y": y, "responses": group, "count": len(part)}
            for name, coefficient in found.items():
                row |= {name: coefficient.value, f"{name}_low": coefficient.low, f"{name}_high": coefficient.high}
            rows.append(row)
    return pd.DataFrame(rows)


def _coefficient(values: Array, several: bool) -> Coefficient:
    """``values [D + 1]``: the data's, then the draws'. One prompt alone has no interval."""
    drawn = values[1:][np.isfinite(values[1:])]
    if not several or len(drawn) < MIN_VALUES or not math.isfinite(values[0]):
        return Coefficient(float(values[0]), math.nan, math.nan)
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Coefficient(float(values[0]), float(low), float(high))
