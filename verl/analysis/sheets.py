"""Builds the analysis tables of responses and of prompts, using the release's column names."""

import itertools
import math
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd
from openpyxl.cell.cell import ILLEGAL_CHARACTERS_RE

from verl.analysis.metrics import (
    count_words,
    frequency_entropy,
    jensen_shannon,
    mean_over_pairs,
    pairwise_similarity,
    repetition_rate,
    symmetric_kl,
    token_shares,
    top_confidence,
)
from verl.config.analysis import AnalysisConfig
from verl.config.errors import ConfigError
from verl.evaluation.benchmarks import Problem
from verl.evaluation.store import StoredSample
from verl.utils.files import replacing
from verl.utils.portable import valid_unicode
from verl.verifiers.verdict import Verdict
from verl.workers.measurements import MeasuredPrompt

RESPONSE_SHEET = "exploit_data (per-rollout)"
PROMPT_SHEET = "explore_data (per-prompt)"
CORRELATION_SHEET = "correlations"
EARLY_SHEET = "early"

FILES = {
    RESPONSE_SHEET: "responses.parquet",
    PROMPT_SHEET: "prompts.parquet",
    CORRELATION_SHEET: "correlations.parquet",
    EARLY_SHEET: "early.parquet",
}

MODEL = ["run", "step", "benchmark", "temperature"]
"""Columns that identify a model and benchmark, for which correlations and figures are computed separately."""

PLACE = (*MODEL, "prompt_id", "rollout_id", "data_source")
"""Columns that identify a row. As in the paper's release, ``rollout_id`` is -1 in the prompt table."""

TEXTS = ("question", "response")
"""Columns written only to Parquet, since workbook cells have a maximum length and may be parsed as formulas."""

CELL = 32_767
"""Maximum number of characters in a workbook cell."""

OF_TOKENS = ("response_entropy", "avg_response_entropy", "response_confidence", "n_gram_repetition_rate")
OF_RESPONSES = (
    *("test_score_0", "correctness", "avg_log_probs", "avg_logits_entropy"),
    *OF_TOKENS,
    *("response_length", "reflection_words", "boxed", "truncated"),
)
"""Response columns other than rank metrics."""

STACKED = (*OF_TOKENS, "response_length")
OF_PAIRS = (
    *("exploration_token_jsd", "pairwise_kl_div", "pairwise_euclidean_dist", "pairwise_cosine_sim", "dist_to_center"),
    *("pairwise_rouge_l", "pairwise_rouge_l_text", "pairwise_rouge1_token", "pairwise_rouge1_text"),
    *("pairwise_rouge2_token", "pairwise_rouge2_text", "pairwise_textual_similarity"),
)
"""Prompt columns that compare a prompt's responses with each other."""


def rank_columns(config: AnalysisConfig) -> dict[str, tuple[str, int]]:
    """Map each rank metric column to its metric name and layer index, with ``analysis.layer`` first."""
    calculator = config.calculator
    places = sorted(range(len(calculator.layers)), key=lambda place: (place != config.layer_place, place))
    return {column(config, place, name): (name, place) for place in places for name in calculator.metric_names}


def column(config: AnalysisConfig, place: int, name: str) -> str:
    """Return the column name of a rank metric for the layer ``calculator.layers[place]``."""
    return name if place == config.layer_place else f"layer_{place + 1}/{name}"


def response_columns(config: AnalysisConfig) -> list[str]:
    return [*rank_columns(config), *OF_RESPONSES]


def prompt_columns(config: AnalysisConfig) -> list[str]:
    ranks = rank_columns(config)
    unstacked = ("Curvature", *config.calculator.own_names)
    stacks = [name for name in ranks if name.rpartition("/")[2].partition(" diff")[0] not in unstacked]
    averages = [f"{name}_avg" for name in OF_RESPONSES]
    stacked = [f"{name}_stack" for name in STACKED]
    return [*(f"{n} Avg" for n in ranks), *(f"{n} Stack" for n in stacks), *averages, *stacked, *OF_PAIRS]


def check_pairs(config: AnalysisConfig) -> None:
    """Raise ``ConfigError`` if a pair contains a metric that is not measured."""
    for field, known in (("response_pairs", response_columns(config)), ("prompt_pairs", prompt_columns(config))):
        for pair in getattr(config.analysis, field):
            for name in pair:
                if name not in known:
                    near = get_close_matches(name, known, n=1)
                    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
                    raise ConfigError(f"analysis.{field}={pair}: {name!r} is not measured; {hint}")


def response_row(
    config: AnalysisConfig,
    sample: StoredSample,
    score: Verdict,
    problem: Problem,
    measured: Mapping[str, Sequence[float]],
) -> dict[str, Any]:
    """Return the metrics of one response, without the identifying columns."""
    tokens = sample.token_ids
    return {
        **{name: measured[metric][place] for name, (metric, place) in rank_columns(config).items()},
        "test_score_0": score.score,
        "correctness": float(score.correct),
        "avg_log_probs": measured["avg_log_probs"][0],
        "avg_logits_entropy": measured["avg_logits_entropy"][0],
        **_token_metrics(config, [tokens]),
        "response_length": len(tokens),
        "reflection_words": count_words(sample.response, config.analysis.reflection_words),
        "boxed": float(score.boxed),
        "truncated": float(sample.truncated),
        "question": valid_unicode(problem.question),
        "response": valid_unicode(sample.response),
    }


def prompt_row(
    config: AnalysisConfig,
    samples: Sequence[StoredSample],
    rows: Sequence[Mapping[str, Any]],
    measured: MeasuredPrompt,
) -> dict[str, Any]:
    """Return the metrics of one prompt, without the identifying columns. ``rows`` are the rows of its responses."""
    tokens = [sample.token_ids for sample in samples]
    shares = [token_shares(ids) for ids in tokens]
    stacked = _token_metrics(config, tokens) | {"response_length": sum(map(len, tokens))}
    row = {f"{name} Avg": _mean(rows, name) for name in rank_columns(config)}
    for place in range(len(config.calculator.layers)):
        row |= {f"{column(config, place, name)} Stack": values[place] for name, values in measured.stack.items()}
    row |= {f"{name}_avg": _mean(rows, name) for name in OF_RESPONSES}
    row |= {f"{name}_stack": float(stacked[name]) for name in STACKED}
    row["exploration_token_jsd"] = mean_over_pairs(shares, jensen_shannon)
    row["pairwise_kl_div"] = mean_over_pairs(shares, partial(symmetric_kl, floor=config.analysis.kl_floor))
    row |= measured.distances | pairwise_similarity(tokens, [sample.response for sample in samples])
    return {name: row[name] for name in prompt_columns(config)}


def of_model(table: pd.DataFrame, place: Sequence[object]) -> pd.DataFrame:
    """Return the rows of ``table`` whose ``MODEL`` columns have the values ``place``."""
    return table[(table[MODEL] == pd.Series(place, index=MODEL)).all(axis=1)] if len(table) else table


def write_parquet(path: Path, table: pd.DataFrame) -> None:
    with replacing(path) as temporary:
        table.to_parquet(temporary, compression="zstd", index=False)


def write_tables(folder: Path, tables: Mapping[str, pd.DataFrame]) -> Path:
    """Write all non-empty sheets to ``analysis.xlsx`` and to Parquet files, and return the workbook's path.

    Stale Parquet files of empty sheets are removed.
    """
    path = folder / "analysis.xlsx"
    with (
        replacing(path) as temporary,
        temporary.open("wb") as file,
        pd.ExcelWriter(file, engine="openpyxl") as workbook,
    ):
        for sheet, table in tables.items():
            if not len(table):
                (folder / FILES[sheet]).unlink(missing_ok=True)
                continue
            write_parquet(folder / FILES[sheet], table)
            cells = table.drop(columns=[name for name in TEXTS if name in table]).map(_as_cell)
            cells.to_excel(workbook, sheet_name=sheet, index=False)
            # Mark strings as text, so that a data source name, for example, is never evaluated as a formula.
            for cell in itertools.chain.from_iterable(workbook.sheets[sheet].iter_rows()):
                if isinstance(cell.value, str):
                    cell.data_type = "s"
    return path


def _as_cell(value: Any) -> Any:
    """Replace characters that a workbook cannot store, and truncate to the maximum cell length."""
    return ILLEGAL_CHARACTERS_RE.sub("\ufffd", value)[:CELL] if isinstance(value, str) else value


def _token_metrics(config: AnalysisConfig, responses: Sequence[Sequence[int]]) -> dict[str, float]:
    """Compute the metrics in ``OF_TOKENS`` for one response or for several stacked responses."""
    together = [token for tokens in responses for token in tokens]
    entropy = frequency_entropy(together)
    confidence = top_confidence(together, config.analysis.confidence_k)
    repetition = repetition_rate(responses, config.analysis.repetition_n)
    return dict(zip(OF_TOKENS, (entropy, entropy, confidence, repetition), strict=True))


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    """Return the mean of the finite values, or NaN if there are none."""
    values = [float(row[name]) for row in rows if math.isfinite(row[name])]
    return fmean(values) if values else math.nan
