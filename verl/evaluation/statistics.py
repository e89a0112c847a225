"""Computes evaluation statistics per checkpoint and benchmark, baseline differences, and averages over benchmarks.

Shapes: P problems with samples, K statistics such as ``pass@4``.
"""

import math
import re
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.stats import binomtest, bootstrap

from verl.algorithms.pass_at_k import k_grid, pass_at_k, rm_at_k
from verl.algorithms.votes import answer_classes, majority_at_k, weighted_majority_at_k
from verl.evaluation.results import ENVIRONMENT, PROMPT_TOO_LONG, REASONS, TaskResult, row_labels
from verl.utils.portable import valid_unicode
from verl.verifiers.answers import vote_key

DRAWS = 4000
"""Number of bootstrap draws per interval, enough to locate the bounds of a 95% interval to half a percentile."""

LEVEL = 0.95
"""Confidence level of the intervals."""

MAX_BLOCK = 1 << 20
"""Maximum number of values (8 MiB) to resample at once."""

REPEATED_WORDS = 4
"""Number of words in the n-grams counted by the repetition rate."""

GROUPS = ("all", "correct", "wrong")
"""Groups of responses over which rank metrics are averaged."""

FIGURES = ("pass", "maj", "rm", "rm_maj")
"""Prefixes of the ``@k`` statistics. ``rm`` and ``rm_maj`` exist only if a reward model scored the samples."""

ENDS = ("", "_low", "_high")
"""Column suffixes of an estimate and of the bounds of its interval, which are NaN if there is only one problem."""

AVERAGE = "macro average"
"""Benchmark name in rows that contain means over benchmarks."""

MIN_CHANGED = 6
"""Minimum number of problems with different results in two runs for a difference to count as significant. With fewer
problems, all differences have the same sign by chance with a probability above 5% (2 / 2^5 for five problems), and the
bootstrap interval may then exclude zero."""

NUMBERS = ["problems", "problems_without_samples", "samples_min", "samples_max"]
RATES = ["mean_tokens", "truncation_rate", "repetition_rate"]
"""Columns of ``results.csv``. ``NUMBERS`` counts problems with and without samples, and gives the minimum and maximum
number of samples per problem. ``RATES`` are means over responses, including the :func:`repetition_rate`."""

Key = tuple[str, str]
"""Benchmark and label that identify a row."""

_WORD = re.compile(r"[^\W\u3040-\u30ff\u3400-\u9fff]+|\S")


@dataclass(frozen=True)
class Summary:
    """Statistics of all results.

    For a run before and after training on one benchmark, the first and last columns of the table look like this::

                          baseline  problems  ...  pass@1  pass@1_low  pass@1_high  ...  reason_correct  reason_wrong
        benchmark run
        aime24    grpo@0                  30  ...    0.25        0.12         0.40  ...             120           360
                  grpo@9    grpo@0        30  ...    0.40        0.25         0.55  ...             192           288
    """

    table: pd.DataFrame
    """One row per benchmark and run, in the order of the results, followed by the averages. The columns match
    ``results.csv``. Undefined values are NaN."""
    labels: list[str]
    benchmarks: list[str]
    averaged: list[str]
    """Benchmarks to average over, which are those with results for every run. Empty if there are fewer than two."""

    @property
    def ks(self) -> list[int]:
        """Values of k in the ``pass@k`` columns."""
        return [int(column.removeprefix("pass@")) for column in self.table if re.fullmatch(r"pass@\d+", column)]

    @property
    def figures(self) -> list[str]:
        """Entries of ``FIGURES`` that the table contains."""
        return [name for name in FIGURES if f"{name}@1" in self.table]

    @property
    def reasons(self) -> list[str]:
        """Reason codes that the table contains."""
        return [reason for reason in REASONS if f"reason_{reason}" in self.table]

    @property
    def metrics(self) -> list[str]:
        """Names of the rank metrics. Each metric has a column ``<name>/<group>`` for every entry of ``GROUPS``."""
        return [column.removesuffix("/all") for column in self.table if column.endswith("/all")]


def summarise(results: Sequence[TaskResult], compare_to: str = "auto", seed: int = 0) -> Summary:
    """Compute the statistics of ``results``.

    Args:
        results: Results in the order in which tables list them.
        compare_to: Baseline of each row on the same benchmark and at the same temperature: ``first`` (the first
            checkpoint in the list), ``step0`` (step 0 of the same run), or ``auto`` (step 0 if the run has it, else
            the first checkpoint). The first checkpoint's other temperatures are compared with its first temperature.
        seed: Bootstrap seed.
    """
    by_key = {(r.benchmark, label): r for r, label in zip(results, row_labels(results), strict=True)}
    benchmarks, labels = (list(dict.fromkeys(key[place] for key in by_key)) for place in (0, 1))
    # Benchmarks are resampled independently, but all runs share the draws of a benchmark.
    seeds = {name: seed + zlib.crc32(name.encode(errors="surrogatepass")) for name in benchmarks}
    figures = {key: problem_figures(result) for key, result in by_key.items()}
    baselines = {key: _baseline(key, by_key, compare_to) for key in by_key}
    drawn = {key: resampled(values, seeds[key[0]]) for key, values in figures.items()}
    changes = {key: _changes(figures[key], figures[other]) for key, other in baselines.items() if other}
    drawn_changes = {key: resampled(values, seeds[key[0]]) for key, values in changes.items() if values.size}

    def estimates(keys: Sequence[Key]) -> dict[str, Any]:
        """Average a run's statistics and their differences from the baseline over the benchmarks in ``keys``."""
        row = {"baseline": "", **intervals([drawn[key] for key in keys], [figures[key] for key in keys])}
        names = {other[1] if (other := baselines[key]) else "" for key in keys}
        if len(names) > 1 or any(key not in drawn_changes for key in keys):
            return row
        differences = intervals([drawn_changes[key] for key in keys])
        num_changed = (pd.concat([changes[key] for key in keys], join="inner") != 0).sum()
        noise = {
            f"{name}_outside_noise": (differences[f"{name}_low"] > 0 or differences[f"{name}_high"] < 0)
            and count >= MIN_CHANGED
            for name, count in num_changed.items()
        }
        return row | {"baseline": names.pop(), **differences, **noise}

    rows = {key: _counts(by_key[key]) | estimates([key]) for name in benchmarks for key in by_key if key[0] == name}
    averaged = [name for name in benchmarks if all(len(figures.get((name, label), ())) for label in labels)]
    averaged = averaged if len(averaged) > 1 else []
    for label in labels if averaged else ():
        keys = [(name, label) for name in averaged]
        rows[AVERAGE, label] = _average_counts([rows[key] for key in keys]) | estimates(keys)
    table = pd.DataFrame(list(rows.values()), index=pd.MultiIndex.from_tuples(rows, names=["benchmark", "run"]))
    return _ordered(Summary(table, labels, benchmarks, averaged)) if rows else Summary(table, [], [], [])


def _ordered(summary: Summary) -> Summary:
    """Sort the columns of the table in the order of ``results.csv``."""
    ks, reasons = sorted(summary.ks), {f"reason_{reason}": 0 for reason in summary.reasons}
    columns = ["baseline", *NUMBERS, *(f"{name}@{k}{end}" for name in summary.figures for k in ks for end in ENDS)]
    columns += [f"difference@{k}{end}" for k in ks for end in (*ENDS, "_outside_noise")]
    columns += [*RATES, *(column for column in summary.table if column.startswith(ENVIRONMENT)), *reasons]
    columns += [f"{name}/{group}" for name in summary.metrics for group in GROUPS]
    table = summary.table.reindex(columns=columns).fillna(reasons).astype(dict.fromkeys([*NUMBERS, *reasons], int))
    return replace(summary, table=table)


def problem_figures(result: TaskResult) -> pd.DataFrame:
    """Return a ``[P, K]`` table of statistics of problems with samples, for k = 1, 2, 4, ... up to the minimum count.

    Problems are identified by index and question, since two runs may use different versions of a benchmark.
    """
    problems = [problem for problem in result.problems if problem.samples]
    counts = [len(problem.samples) for problem in problems]
    correct = [[sample.correct for sample in problem.samples] for problem in problems]
    votes = [
        answer_classes(right, [vote_key(sample.answer) for sample in problem.samples])
        for right, problem in zip(correct, problems, strict=True)
    ]
    # A sample that was not generated has no score and ranks last.
    scores = [[math.nan if s.score is None else s.score for s in problem.samples] for problem in problems]
    ks = k_grid(min(counts, default=0))
    num_samples, num_correct = torch.tensor(counts), torch.tensor(list(map(sum, correct)))
    columns: dict[str, Any] = {f"pass@{k}": pass_at_k(num_samples, num_correct, k).numpy() for k in ks}
    columns |= {f"maj@{k}": [majority_at_k(*vote, k) for vote in votes] for k in ks}
    if any(sample.score is not None for problem in problems for sample in problem.samples):
        judged, weighed = list(zip(correct, scores, strict=True)), list(zip(votes, scores, strict=True))
        columns |= {f"rm@{k}": [rm_at_k(right, given, k) for right, given in judged] for k in ks}
        columns |= {f"rm_maj@{k}": [weighted_majority_at_k(*vote, given, k) for vote, given in weighed] for k in ks}
    names = [valid_unicode(f"{problem.index} {problem.question}") for problem in problems]
    return pd.DataFrame(columns, index=names, dtype=np.float64)


def _baseline(key: Key, results: Mapping[Key, TaskResult], compare_to: str) -> Key | None:
    """Return the key of a result's baseline, or None if there is none or the result is its own baseline."""
    result, first = results[key], next(iter(results.values()))
    group = {other: r for other, r in results.items() if r.benchmark == result.benchmark}
    same = {other: r for other, r in group.items() if r.temperature == result.temperature}
    others = [other for other, r in same.items() if r.label == f"{result.run}@0"] if compare_to != "first" else []
    if compare_to != "step0" and (result.step == 0 or not others):
        among = group if result.label == first.label else same
        others = [other for other, r in among.items() if r.label == first.label]
    baseline = next(iter(others), None)
    return None if baseline == key else baseline


def _changes(figures: pd.DataFrame, baseline: pd.DataFrame) -> pd.DataFrame:
    """Return the pass@k differences from the baseline, as ``difference@k``, for the problems in both tables."""
    one, other = figures.filter(like="pass@").align(baseline.filter(like="pass@"), join="inner")
    return (one - other).rename(columns=lambda column: column.replace("pass", "difference"))


def resampled(values: pd.DataFrame, seed: int = 0, draws: int = DRAWS) -> pd.DataFrame:
    """Return a table of shape ``[1 + draws, K]`` with column means over the problems and then over resampled problems.

    All columns share the same draws. With a single problem, the variance is unknown, so the draws are NaN.
    """
    means = np.full((draws, len(values.columns)), math.nan)
    if len(values) > 1 and values.size:
        means = bootstrap(
            (values.to_numpy(),),
            np.mean,
            n_resamples=draws,
            batch=max(1, MAX_BLOCK // values.size),
            method="percentile",
            rng=np.random.default_rng(seed),
        ).bootstrap_distribution.T
    return pd.concat([values.mean().to_frame().T, pd.DataFrame(means, columns=values.columns)])


def intervals(drawn: Sequence[pd.DataFrame], shares: Sequence[pd.DataFrame] = ()) -> dict[str, float]:
    """Return each column's mean over benchmarks with its percentile interval.

    Args:
        drawn: :func:`resampled` values of each benchmark. Columns missing from any benchmark are ignored.
        shares: Per-problem values of each benchmark if they are in [0, 1], or empty. If all problems of a benchmark
            have equal values, such as 0 of 12 correct, the draws do not vary, and the benchmark contributes a Wilson
            interval (JASA 1927, 22:209) for the sum of the values, rounded to an integer.

    Returns:
        Value, lower end and upper end of each interval, keyed by column name plus a suffix from ``ENDS``.
    """
    columns = [column for column in drawn[0] if all(column in part for part in drawn)]
    macro = np.mean([part[columns].to_numpy() for part in drawn], axis=0)
    low, high = np.quantile(macro[1:], [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    for values in shares:
        for place in np.flatnonzero(values[columns].nunique() == 1):
            share, count = values[columns[place]].iloc[0], len(values)
            wilson = binomtest(round(share * count), count).proportion_ci(LEVEL, "wilson")
            # Widths of independent terms add in quadrature (Zou and Donner 2008, Statistics in Medicine 27:1693).
            for side, ends, bound in ((-1, low, wilson.low), (1, high, wilson.high)):
                width = math.hypot(ends[place] - macro[0, place], (bound - share) / len(drawn))
                ends[place] = macro[0, place] + side * width
    rows = zip(columns, macro[0].tolist(), low.tolist(), high.tolist(), strict=True)
    return {f"{column}{end}": value for column, *row in rows for end, value in zip(ENDS, row, strict=True)}


def _counts(result: TaskResult) -> dict[str, Any]:
    """Return the numbers of problems and samples, the count of each reason, the ``RATES``, and mean metrics."""
    samples = [sample for problem in result.problems for sample in problem.samples]
    counts = [len(problem.samples) for problem in result.problems if problem.samples]
    numbers = (len(counts), len(result.problems) - len(counts), min(counts, default=0), max(counts, default=0))
    generated = [sample for sample in samples if sample.reason != PROMPT_TOO_LONG]
    rates = [[s.num_tokens, s.truncated, repetition_rate(s.response)] for s in generated]
    row = dict(zip(NUMBERS, numbers, strict=True)) | dict(pd.DataFrame(rates, columns=RATES, dtype=np.float64).mean())
    row |= {f"reason_{reason}": count for reason, count in Counter(sample.reason for sample in samples).items()}
    of_conversations = [sample.environment for sample in generated if sample.environment]
    row |= {f"{ENVIRONMENT}{name}": mean for name, mean in pd.DataFrame(of_conversations).mean().items()}
    metrics = pd.DataFrame([sample.metrics for sample in samples], dtype=np.float64)
    correct = np.array([sample.correct for sample in samples], dtype=bool)
    for name, values in metrics.where(np.isfinite(metrics)).items():
        means = (values.mean(), values[correct].mean(), values[~correct].mean())
        row |= {f"{name}/{group}": mean for group, mean in zip(GROUPS, means, strict=True)}
    return row


def _average_counts(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Aggregate :func:`_counts` over benchmarks: total counts, minimum and maximum sample count, and mean ``RATES``."""
    table = pd.DataFrame(rows)
    sums = [*NUMBERS[:2], *(column for column in table if column.startswith("reason_"))]
    lowest, highest = NUMBERS[2:]
    ends = {lowest: table[lowest].min(), highest: table[highest].max()}
    return dict(table[sums].sum()) | ends | dict(table[RATES].mean(skipna=False))


def repetition_rate(text: str, length: int = REPEATED_WORDS) -> float:
    """Return the fraction of ``length``-word n-grams that occurred earlier in ``text``, or 0 if the text is too short.

    A word is a sequence of letters and digits, a punctuation mark, or a single Chinese or Japanese character.
    """
    words = _WORD.findall(text)
    sequences = len(words) - length + 1
    if sequences < 1:
        return 0.0
    return 1 - len(set(zip(*(words[i:] for i in range(length)), strict=False))) / sequences
