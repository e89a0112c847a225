"""Correlations of metrics with bootstrap intervals over prompts.

Responses to one prompt are alike, so what is drawn with replacement is prompts, each with all its responses: a
response's weight is the number of times that its prompt was drawn. Ranks are computed again in each draw.

N: responses (or prompts), D: draws.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from verl.evaluation.statistics import GROUPS, LEVEL

Array = NDArray[np.float64]

MIN_VALUES = 3
"""Fewer values have no correlation."""

BLOCK = 1 << 19
"""Responses times draws that are computed at once: 4 MiB for each column, and as much for its ranks."""

COEFFICIENTS = ("pearson", "spearman", "pearson_partial", "spearman_partial")


def draw_weights(prompts: Sequence[int], draws: int, seed: int) -> Array:
    """Draw counts of each response's prompt, ``[D + 1, N]``; the first row is all 1, the data as they are."""
    names, places = np.unique(np.asarray(prompts), return_inverse=True)
    generator = np.random.default_rng(seed)
    counts = generator.multinomial(len(names), np.full(len(names), 1 / len(names)), size=draws)
    weights: Array = np.concatenate([np.ones((1, len(places))), counts[:, places]]).astype(np.float64)
    return weights


def unit(values: Array, weights: Array) -> Array:
    """Deviations from the weighted mean, times the root of their weight, of length 1; NaN if constant.

    Args:
        values: ``[N]`` or ``[D, N]``.
        weights: ``[D, N]``.

    Returns:
        ``[D, N]``.
    """
    total = weights.sum(axis=1)
    means = (weights @ values if values.ndim == 1 else np.einsum("dn,dn->d", weights, values)) / total
    deviations: Array = (values - means[:, None]) * np.sqrt(weights)
    squares = np.einsum("dn,dn->d", deviations, deviations)
    # A column that is constant within a draw has only the rounding of its mean left.
    tiny = 1e-13 * np.abs(values).max(initial=0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        deviations /= np.where(squares > total * tiny**2, np.sqrt(squares), np.nan)[:, None]
    return deviations


def product(x: Array, y: Array) -> Array:
    """Pearson's correlation ``[D]`` of two columns of :func:`unit`."""
    products: Array = np.clip(np.einsum("dn,dn->d", x, y), -1, 1)
    return products


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


def correlation_table(
    frame: pd.DataFrame, pairs: Sequence[tuple[str, str]], length: str, correct: str | None, draws: int, seed: int
) -> pd.DataFrame:
    """A row for each pair of columns and group of rows of ``frame``; ``count`` is of the rows that both are known of.

    Args:
        frame: with a column ``prompt_id``.
        length: the column that is held fixed in partial correlations.
        correct: the column that tells correct from wrong rows; None: no such groups.
    """
    groups = GROUPS if correct is not None else ["all"]
    by_group = {}
    for group in groups:
        part = frame if group == "all" else frame[frame[correct] == (1.0 if group == "correct" else 0.0)]
        names = dict.fromkeys([length, *(name for pair in pairs for name in pair)])
        columns = {name: part[name].to_numpy(dtype=np.float64, na_value=np.nan) for name in names}
        by_group[group] = _correlate_pairs(columns, pairs, length, part["prompt_id"].tolist(), draws, seed)
    return pd.DataFrame(
        [
            {"x": x, "y": y, "responses": group} | by_group[group][place]
            for place, (x, y) in enumerate(pairs)
            for group in groups
        ]
    )


def _correlate_pairs(
    columns: Mapping[str, Array],
    pairs: Sequence[tuple[str, str]],
    length: str,
    prompts: Sequence[int],
    draws: int,
    seed: int,
) -> list[dict[str, float]]:
    """For each pair of ``columns``, each ``[N]``, the ``count`` of its rows, its ``COEFFICIENTS`` and their intervals.

    Undefined ones are NaN, as with a constant column; one prompt alone has no intervals.
    """
    places = np.asarray(prompts)
    finite = {name: np.isfinite(values) for name, values in columns.items()}
    # Pairs over the same rows share the draws, and what is computed of each column.
    by_rows: dict[bytes, list[int]] = {}
    for number, (x, y) in enumerate(pairs):
        by_rows.setdefault((finite[x] & finite[y] & finite[length]).tobytes(), []).append(number)
    results: list[dict[str, float]] = [{}] * len(pairs)
    for rows, numbers in by_rows.items():
        kept = np.frombuffer(rows, dtype=bool)
        drawn = np.full((len(numbers), len(COEFFICIENTS), 1), np.nan)
        if kept.sum() >= MIN_VALUES:
            weights = draw_weights(places[kept].tolist(), draws, seed)
            used = {name: values[kept] for name, values in columns.items()}
            drawn = _draw_pairs(used, [pairs[number] for number in numbers], length, weights)
        several = len(set(places[kept].tolist())) > 1
        for number, of_pair in zip(numbers, drawn, strict=True):
            results[number] = {"count": int(kept.sum())}
            for name, values in zip(COEFFICIENTS, of_pair, strict=True):
                low, high = _interval(values) if several else (np.nan, np.nan)
                results[number] |= {name: float(values[0]), f"{name}_low": low, f"{name}_high": high}
    return results


def _draw_pairs(
    columns: Mapping[str, Array], pairs: Sequence[tuple[str, str]], length: str, weights: Array
) -> NDArray[np.float64]:
    """``[pairs, coefficients, D + 1]`` under ``weights [D + 1, N]``, block by block."""
    drawn = np.empty((len(pairs), len(COEFFICIENTS), len(weights)))
    size = max(1, BLOCK // weights.shape[1])
    for start in range(0, len(weights), size):
        block = weights[start : start + size]
        for kind, ranked in enumerate((False, True)):
            units = {
                name: unit(weighted_ranks(columns[name], block) if ranked else columns[name], block)
                for name in dict.fromkeys([length, *(name for pair in pairs for name in pair)])
            }
            with_length = {name: product(values, units[length]) for name, values in units.items()}
            for number, (x, y) in enumerate(pairs):
                xy = product(units[x], units[y])
                drawn[number, kind, start : start + size] = xy
                drawn[number, kind + 2, start : start + size] = partial(xy, with_length[x], with_length[y])
    return drawn


def _interval(values: Array) -> tuple[float, float]:
    """Of ``values [D + 1]``, the data's and then the draws'."""
    drawn = values[1:][np.isfinite(values[1:])]
    if len(drawn) < MIN_VALUES or not np.isfinite(values[0]):
        return np.nan, np.nan
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
