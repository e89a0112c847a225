"""Correlations of metrics with bootstrap intervals over prompts.

Responses to one prompt are alike, so what is drawn with replacement is prompts, each with all its responses: a
response's weight is the number of times that its prompt was drawn. Ranks are computed again in each draw.

C: columns, N: responses (or prompts), D: draws.
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from verl.evaluation.statistics import GROUPS, LEVEL

Array = NDArray[np.float64]
Counts = NDArray[np.int64]

MIN_VALUES = 3
"""Fewer values have no correlation."""

COEFFICIENTS = ("pearson", "spearman", "pearson_partial", "spearman_partial")


def draw_weights(prompts: Sequence[int], draws: int, seed: int) -> Counts:
    """Draw counts of each response's prompt, ``[D + 1, N]``; the first row is all 1, the data as they are."""
    names, places = np.unique(np.asarray(prompts), return_inverse=True)
    generator = np.random.default_rng(seed)
    counts = generator.multinomial(len(names), np.full(len(names), 1 / len(names)), size=draws)
    return np.concatenate([np.ones((1, len(places)), dtype=np.int64), counts[:, places]])


def correlate(columns: Array, weights: Counts) -> Array:
    """Return Pearson's and Spearman's correlations of ``columns [C, N]``, ``[D, 2, C, C]``.

    They are weighted by each row of ``weights [D, N]``; NaN with a constant column.
    """
    ties = [np.unique(values, return_inverse=True)[1] for values in columns]
    correlations = np.empty((len(weights), 2, len(columns), len(columns)))
    for draw, counts in enumerate(weights):
        of_value = [np.bincount(places, counts) for places in ties]
        # Equal values share the mean of their places.
        ranks = [(np.cumsum(n) - (n - 1) / 2)[places] for n, places in zip(of_value, ties, strict=True)]
        for kind, values in enumerate((columns, np.stack(ranks))):
            covariance = np.atleast_2d(np.cov(values, fweights=counts))
            deviations = np.sqrt(np.diag(covariance))
            # A column that is constant within a draw has only the rounding of its mean left.
            deviations[deviations <= 1e-13 * np.abs(values).max(axis=1)] = np.nan
            correlations[draw, kind] = np.clip(covariance / np.outer(deviations, deviations), -1, 1)
    return correlations


def partial(correlations: Array) -> Array:
    """Return correlations ``[..., C, C]`` with the first column held fixed; NaN where it determines another."""
    with_first = correlations[..., :1, :]
    rest = (1 - with_first**2) * (1 - np.swapaxes(with_first, -1, -2) ** 2)
    with np.errstate(invalid="ignore", divide="ignore"):
        held = (correlations - with_first * np.swapaxes(with_first, -1, -2)) / np.sqrt(rest)
        return np.where(rest > 1e-12, held, np.nan)


def correlation_table(
    frame: pd.DataFrame, pairs: Sequence[tuple[str, str]], length: str, correct: str | None, draws: int, seed: int
) -> pd.DataFrame:
    """Return a row for each pair of columns and group of rows of ``frame``.

    It has the ``count`` of rows in which both are known, ``COEFFICIENTS`` and their intervals. Undefined ones are NaN;
    one prompt alone has no intervals.

    Args:
        frame: with a column ``prompt_id``.
        length: the column that is held fixed in partial correlations.
        correct: the column that tells correct from wrong rows; None: no such groups.
    """
    groups = list(GROUPS) if correct is not None else ["all"]
    rows = {}
    for group in groups:
        part = frame if group == "all" else frame[frame[correct] == (1.0 if group == "correct" else 0.0)]
        # Pairs over the same rows share the draws.
        by_rows: dict[bytes, list[tuple[str, str]]] = {}
        for pair in pairs:
            known = np.isfinite(part[[length, *pair]].to_numpy(dtype=np.float64, na_value=np.nan)).all(axis=1)
            by_rows.setdefault(known.tobytes(), []).append(pair)
        for known_rows, alike in by_rows.items():
            kept = part[np.frombuffer(known_rows, dtype=bool)]
            for pair, figures in zip(alike, _figures(kept, alike, length, draws, seed), strict=True):
                rows[pair, group] = {"count": len(kept)} | figures
    return pd.DataFrame(
        [{"x": x, "y": y, "responses": group} | rows[(x, y), group] for x, y in pairs for group in groups]
    )


def _figures(
    rows: pd.DataFrame, pairs: Sequence[tuple[str, str]], length: str, draws: int, seed: int
) -> list[dict[str, float]]:
    """Return the coefficients of each pair with their intervals; all values are finite."""
    names = [name for of in COEFFICIENTS for name in (of, f"{of}_low", f"{of}_high")]
    if len(rows) < MIN_VALUES:
        return [dict.fromkeys(names, np.nan)] * len(pairs)
    columns = list(dict.fromkeys([length, *chain.from_iterable(pairs)]))
    found = correlate(rows[columns].to_numpy(dtype=np.float64).T, draw_weights(rows["prompt_id"].tolist(), draws, seed))
    x, y = ([columns.index(name) for name in side] for side in zip(*pairs, strict=True))
    # Draws, coefficients, pairs.
    drawn = np.concatenate([found, partial(found)], axis=1)[:, :, x, y]
    ends = np.full((2, *drawn.shape[1:]), np.nan)
    # Undefined draws do not count.
    wide = np.isfinite(drawn[0]) & (np.isfinite(drawn[1:]).sum(axis=0) >= MIN_VALUES)
    if rows["prompt_id"].nunique() > 1:
        ends[:, wide] = np.nanquantile(drawn[1:, wide], [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    figures = np.stack([drawn[0], *ends], axis=1).reshape(len(names), len(pairs))
    return [dict(zip(names, of_pair.tolist(), strict=True)) for of_pair in figures.T]
