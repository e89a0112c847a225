"""Computes correlations between metrics, with bootstrap intervals over prompts.

Since responses to the same prompt are correlated, the bootstrap resamples prompts together with their responses. The
weight of a response is the number of times its prompt was drawn. Ranks are recomputed for each draw.

Shapes: C columns, N responses (or prompts), D draws.
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
"""Minimum number of values required to compute a correlation."""

COEFFICIENTS = ("pearson", "spearman", "pearson_partial", "spearman_partial")


def draw_weights(prompts: Sequence[int], draws: int, seed: int) -> Counts:
    """Draw bootstrap weights ``[D + 1, N]`` of responses. The first row is all 1 and represents the original data."""
    names, places = np.unique(np.asarray(prompts), return_inverse=True)
    generator = np.random.default_rng(seed)
    counts = generator.multinomial(len(names), np.full(len(names), 1 / len(names)), size=draws)
    return np.concatenate([np.ones((1, len(places)), dtype=np.int64), counts[:, places]])


def correlate(columns: Array, weights: Counts) -> Array:
    """Return Pearson and Spearman correlations ``[D, 2, C, C]`` between ``columns [C, N]``.

    Each row of ``weights [D, N]`` yields one set of weighted correlations. Correlations with a constant column are NaN.
    """
    ties = [np.unique(values, return_inverse=True)[1] for values in columns]
    correlations = np.empty((len(weights), 2, len(columns), len(columns)))
    for draw, counts in enumerate(weights):
        of_value = [np.bincount(places, counts) for places in ties]
        # Ties share their mean rank.
        ranks = [(np.cumsum(n) - (n - 1) / 2)[places] for n, places in zip(of_value, ties, strict=True)]
        for kind, values in enumerate((columns, np.stack(ranks))):
            covariance = np.atleast_2d(np.cov(values, fweights=counts))
            deviations = np.sqrt(np.diag(covariance))
            # The deviation of a column that is constant within a draw is only the rounding error of its mean.
            deviations[deviations <= 1e-13 * np.abs(values).max(axis=1)] = np.nan
            correlations[draw, kind] = np.clip(covariance / np.outer(deviations, deviations), -1, 1)
    return correlations


def partial(correlations: Array) -> Array:
    """Return partial correlations ``[..., C, C]`` controlling for the first column (NaN for columns it determines)."""
    with_first = correlations[..., :1, :]
    rest = (1 - with_first**2) * (1 - np.swapaxes(with_first, -1, -2) ** 2)
    with np.errstate(invalid="ignore", divide="ignore"):
        held = (correlations - with_first * np.swapaxes(with_first, -1, -2)) / np.sqrt(rest)
        return np.where(rest > 1e-12, held, np.nan)


def correlation_table(
    frame: pd.DataFrame, pairs: Sequence[tuple[str, str]], length: str, correct: str | None, draws: int, seed: int
) -> pd.DataFrame:
    """Return a table with one row for each pair of columns and each group of rows of ``frame``.

    The table contains ``COEFFICIENTS`` with intervals, and ``count``, the number of rows where the pair and ``length``
    are finite. Undefined values are NaN, including all intervals if there is only one prompt.

    Args:
        frame: Table with a column ``prompt_id``.
        length: Column to control for in partial correlations.
        correct: Column that separates correct from wrong rows, or None to omit these groups.
    """
    groups = list(GROUPS) if correct is not None else ["all"]
    rows = {}
    for group in groups:
        part = frame if group == "all" else frame[frame[correct] == (1.0 if group == "correct" else 0.0)]
        # Pairs with values in the same rows share the draws.
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
    """Return each pair's coefficients with intervals. All input values must be finite."""
    names = [name for of in COEFFICIENTS for name in (of, f"{of}_low", f"{of}_high")]
    if len(rows) < MIN_VALUES:
        return [dict.fromkeys(names, np.nan)] * len(pairs)
    columns = list(dict.fromkeys([length, *chain.from_iterable(pairs)]))
    found = correlate(rows[columns].to_numpy(dtype=np.float64).T, draw_weights(rows["prompt_id"].tolist(), draws, seed))
    x, y = ([columns.index(name) for name in side] for side in zip(*pairs, strict=True))
    # Shape: draws, coefficients, pairs.
    drawn = np.concatenate([found, partial(found)], axis=1)[:, :, x, y]
    ends = np.full((2, *drawn.shape[1:]), np.nan)
    # Ignore undefined draws.
    wide = np.isfinite(drawn[0]) & (np.isfinite(drawn[1:]).sum(axis=0) >= MIN_VALUES)
    if rows["prompt_id"].nunique() > 1:
        ends[:, wide] = np.nanquantile(drawn[1:, wide], [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    figures = np.stack([drawn[0], *ends], axis=1).reshape(len(names), len(pairs))
    return [dict(zip(names, of_pair.tolist(), strict=True)) for of_pair in figures.T]
