"""Computes how well metrics of response prefixes distinguish correct from wrong responses.

The area under the ROC curve (AUC) is the probability that a metric is higher for a correct response than for a wrong
one, with ties counted as half. The pooled AUC compares responses across all prompts. The within-prompt AUC compares
only responses to the same prompt, so it does not depend on how difficult the prompts are.

Shapes: N responses, J prefixes of a response, P prompts, D draws.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from verl.analysis.correlations import draw_weights
from verl.analysis.sheets import MODEL
from verl.config.analysis import AnalysisConfig
from verl.config.calculator import CalculatorConfig
from verl.evaluation.statistics import ENDS, LEVEL
from verl.rank.dynamics import acceleration, velocity

Array = NDArray[np.float64]
Bools = NDArray[np.bool_]
Places = NDArray[np.int64]

SHARES = tuple(tenths / 10 for tenths in range(1, 11))
"""Lengths of the analysed prefixes as fractions of the response length."""

MIN_EACH = 10
"""Minimum number of correct and of wrong responses for an AUC, and of prompts with both for a within-prompt AUC."""

RESPONSE = ["prompt_id", "rollout_id"]

LENGTH = "response_length"
"""Metric evaluated only at shares of the response, because a token position does not reveal the response length."""

COLUMNS = (
    *(*MODEL, "by", "at", "metric", "responses", "correct", "mean_length", "prompts", "mixed_prompts"),
    *(f"{name}{end}" for name in ("auc", "within") for end in ENDS),
)


def early_table(config: AnalysisConfig, courses: pd.DataFrame) -> pd.DataFrame:
    """Return the AUC of each metric as a predictor of correctness, measured on prefixes of the responses.

    Each prefix ends at a share of the response's tokens or at a fixed token position. The positions start at
    ``calculator.diff_stride`` and double each time. At each position, only longer responses are included. Shares and
    positions with fewer than ``MIN_EACH`` correct or wrong responses are omitted. The table is empty unless prefixes
    starting at the first token were measured.

    Args:
        courses: Metrics along responses, as in ``courses.parquet``.
    """
    calculator, rows = config.calculator, list[dict[str, Any]]()
    from_start = calculator.max_seq_len is None or calculator.max_seq_len_from == "start"
    for place, part in courses.groupby(MODEL, sort=False) if calculator.compute_diff and from_start else ():
        points = _points(calculator, part.reset_index(drop=True), config.analysis.draws, config.seed)
        rows.extend(dict(zip(MODEL, place, strict=True)) | point for point in points)
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _points(calculator: CalculatorConfig, courses: pd.DataFrame, draws: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield one table row for each metric of a model at each share and token position."""
    responses, metrics = prefix_metrics(calculator, courses)
    length, prompts = responses[LENGTH].to_numpy(), responses["prompt_id"].to_numpy()
    correct = responses["correctness"].to_numpy() == 1
    end = metrics[LENGTH].shape[1] - 1
    for by, at, column in [*_shares(calculator, length, end), *_positions(calculator, length, end)]:
        for name, values in metrics.items():
            value = np.where(column < 0, np.nan, values[np.arange(len(length)), column])
            known = np.isfinite(value)
            right, num_known = int(correct[known].sum()), int(known.sum())
            if min(right, num_known - right) < MIN_EACH or (name == LENGTH and by == "position"):
                continue
            counts = {"responses": num_known, "correct": right, "mean_length": float(length[known].mean())}
            counts["prompts"] = len(np.unique(prompts[known]))
            figures = auc_figures(value[known], correct[known], prompts[known], draws, seed)
            yield {"by": by, "at": at, "metric": name} | counts | figures


def _shares(calculator: CalculatorConfig, length: Places, end: int) -> Iterator[tuple[str, float, Places]]:
    """Yield each share and the column ``[N]`` of each response's longest prefix within that share (-1 if none)."""
    for share in SHARES:
        # The smallest error of rounding would make 0.3 of 10 tokens less than 3.
        tokens = np.floor(share * length + 1e-9).astype(np.int64)
        column = (tokens - calculator.prefix_extra) // calculator.diff_stride - 1
        yield "share", share, column.clip(-1, end - 1) if share < 1 else np.full(len(length), end)


def _positions(calculator: CalculatorConfig, length: Places, end: int) -> Iterator[tuple[str, float, Places]]:
    """Yield each position and the column ``[N]`` of each longer response's prefix, or -1 for all other responses."""
    strides = 1
    while strides <= end:
        tokens = strides * calculator.diff_stride
        yield "position", float(tokens), np.where(length > tokens, strides - 1, -1)
        strides *= 2


def prefix_metrics(calculator: CalculatorConfig, courses: pd.DataFrame) -> tuple[pd.DataFrame, dict[str, Array]]:
    """Return a table of responses, and each metric's values ``[N, J + 1]`` after 1, ..., J strides and at the end.

    Each value describes a whole prefix. Entropy is averaged over the prefix's tokens, and velocity and acceleration are
    computed from all prefixes up to that one. Values are NaN where a response has ended or has too few prefixes.
    """
    by_response, tokens = courses.groupby(RESPONSE), courses["tokens"]
    responses = by_response.agg(correctness=("correctness", "first"), response_length=("tokens", "max")).reset_index()
    # 1. Turn means over the tokens since the previous prefix into means over the prefix.
    sums = (by_response["tokens"].diff().fillna(tokens) * courses["entropy"]).groupby([courses[c] for c in RESPONSE])
    courses = courses.assign(entropy=sums.cumsum() / tokens)
    # 2. Arrange each metric in a row for each response, with a column for each prefix and one for the end.
    strides, rest = np.divmod(tokens - calculator.prefix_extra, calculator.diff_stride)
    courses = courses.assign(strides=strides)
    prefixes, whole = courses[(rest == 0) & (strides > 0)], courses[tokens == by_response["tokens"].transform("max")]
    index, columns = pd.MultiIndex.from_frame(responses[RESPONSE]), range(1, max(0, int(strides.max())) + 1)

    def arrange(name: str) -> Array:
        table = prefixes.pivot(index=RESPONSE, columns="strides", values=name).reindex(index=index, columns=columns)
        return np.column_stack([table, whole.set_index(RESPONSE)[name].reindex(index)]).astype(np.float64)

    # 3. Add velocity and acceleration of the first j prefixes; at the end, of all prefixes.
    metrics = dict[str, Array]()
    for name in calculator.base_names:
        metrics[name] = values = arrange(name)
        for suffix, change, least in ((" diff", velocity, 2), (" diff 2", acceleration, 3)):
            moved = np.full(values.shape, np.nan)
            for j in range(least, values.shape[1]):
                moved[:, j - 1] = change(torch.from_numpy(values[:, :j]), torch.full((len(values),), j))
            moved[:, -1] = pd.DataFrame(moved).ffill(axis=1).iloc[:, -1]
            metrics[name + suffix] = moved
    metrics |= {name: arrange(name) for name in ("entropy", "state_speed", "state_dispersion")}
    return responses, metrics | {LENGTH: np.tile(responses[[LENGTH]].to_numpy(np.float64), len(columns) + 1)}


def auc_figures(values: Array, correct: Bools, prompts: Places, draws: int, seed: int) -> dict[str, float]:
    """Return ``mixed_prompts``, the pooled AUC (``auc``) and the within-prompt AUC (``within``), with 95% intervals.

    Intervals are percentiles of a bootstrap over prompts. The AUC within prompts is NaN if fewer than ``MIN_EACH``
    prompts have both correct and wrong responses. Intervals are NaN if there is only one prompt.

    Args:
        values: Finite values of a metric, ``[N]``.
        prompts: Prompt of each response, ``[N]``.
    """
    names, places = np.unique(prompts, return_inverse=True)
    size = len(names)
    right, wrong = (np.bincount(places[of], minlength=size) for of in (correct, ~correct))
    # 1. Count the pairs [P, P] of a correct response to one prompt and a wrong one to another that the former wins.
    wins = np.zeros((size, size))
    for prompt in np.flatnonzero(wrong):
        others = np.sort(values[~correct & (places == prompt)])
        below, up_to = (np.searchsorted(others, values[correct], side) for side in ("left", "right"))
        wins[:, prompt] = np.bincount(places[correct], (below + up_to) / 2, minlength=size)
    # 2. Weigh them by how often both prompts were drawn, [D + 1, P]; the first row is the data.
    weights = draw_weights(range(size), draws, seed).astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        pooled = ((weights @ wins) * weights).sum(axis=1) / ((weights @ right) * (weights @ wrong))
        within = (weights @ wins.diagonal()) / (weights @ (right * wrong))
    mixed = int(np.count_nonzero(right * wrong))
    figures: dict[str, float] = {"mixed_prompts": mixed}
    for name, drawn in (("auc", pooled), ("within", within if mixed >= MIN_EACH else np.full(len(within), np.nan))):
        drawable = size > 1 and np.isfinite(drawn[0])
        ends = np.nanquantile(drawn[1:], [(1 - LEVEL) / 2, (1 + LEVEL) / 2]) if drawable else [np.nan] * 2
        figures |= {f"{name}{end}": float(v) for end, v in zip(ENDS, (drawn[0], *ends), strict=True)}
    return figures
