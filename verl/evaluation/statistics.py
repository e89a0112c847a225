"""The figures of an evaluation: a row per checkpoint and benchmark, differences between rows, averages over benchmarks.

P: problems with samples. K: figures, such as ``pass@4``.
"""

import math
import re
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.stats import binomtest, bootstrap

from verl.algorithms.pass_at_k import k_grid, pass_at_k, rm_at_k
from verl.algorithms.votes import answer_classes, majority_at_k, weighted_majority_at_k
from verl.evaluation.results import PROMPT_TOO_LONG, REASONS, TaskResult, row_labels
from verl.utils.portable import valid_unicode
from verl.verifiers.answers import vote_key

DRAWS = 4000
"""Resamplings per interval. The ends of a 95% interval are then usually less than half a percentile off."""

LEVEL = 0.95
"""Share of intervals that contain the true value."""

MAX_BLOCK = 1 << 20
"""Values that are resampled at once: 8 MiB."""

REPEATED_WORDS = 4
"""Length of the word sequences whose repetition is counted."""

GROUPS = ("all", "correct", "wrong")
"""Groups of responses over which rank metrics are averaged."""

FIGURES = ("pass", "maj", "rm", "rm_maj")
"""``pass@k`` and the like; the last two where a reward model scored the samples."""

ENDS = ("", "_low", "_high")
"""Endings of the columns of an estimate: its value and its interval, NaN if there was only one problem."""

AVERAGE = "macro average"
"""The benchmark of rows that hold the mean over benchmarks."""

MIN_CHANGED = 6
"""Problems that must differ between two runs before a difference can be outside the noise. Fewer problems all differ in
the same direction by chance more often than once in 20 (2 / 2^5), whatever a bootstrap of so few says."""

NUMBERS = ["problems", "problems_without_samples", "samples_min", "samples_max"]
RATES = ["mean_tokens", "truncation_rate", "repetition_rate"]
"""Columns: problems that have samples, and that have none; the fewest and most samples of a problem; means over
responses of their lengths, of whether they were cut, and of :func:`repetition_rate`."""

Key = tuple[str, str]
"""Benchmark and label of a row."""

_WORD = re.compile(r"[^\W\u3040-\u30ff\u3400-\u9fff]+|\S")


@dataclass(frozen=True)
class Summary:
    """The figures of all results.

    The table of a run before and after training, on one benchmark, begins and ends with::

                          baseline  problems  ...  pass@1  pass@1_low  pass@1_high  ...  reason_correct  reason_wrong
        benchmark run
        aime24    grpo@0                  30  ...    0.25        0.12         0.40  ...             120           360
                  grpo@9    grpo@0        30  ...    0.40        0.25         0.55  ...             192           288
    """

    table: pd.DataFrame
    """A row per benchmark and run, both in the order of the results, then the averages; the columns are those of
    ``results.csv``, NaN where undefined."""
    labels: list[str]
    benchmarks: list[str]
    averaged: list[str]
    """Benchmarks that every run has, over which the averages are; empty if these are fewer than two."""

    @property
    def ks(self) -> list[int]:
        """Every k that some row has."""
        return [int(column.removeprefix("pass@")) for column in self.table if re.fullmatch(r"pass@\d+", column)]

    @property
    def figures(self) -> list[str]:
        """Entries of ``FIGURES`` that some row has."""
        return [name for name in FIGURES if f"{name}@1" in self.table]

    @property
    def reasons(self) -> list[str]:
        """Reasons for verdicts that some row has."""
        return [reason for reason in REASONS if f"reason_{reason}" in self.table]

    @property
    def metrics(self) -> list[str]:
        """Names of the rank metrics, whose columns are ``<name>/<one of GROUPS>``."""
        return [column.removesuffix("/all") for column in self.table if column.endswith("/all")]


def summarise(results: Sequence[TaskResult], compare_to: str = "auto", seed: int = 0) -> Summary:
    """Return the figures of ``results``.

    Args:
        results: in the order of the tables.
        compare_to: the baseline of a row, on the same benchmark and at the same temperature: ``first`` is the first
            checkpoint in the list, ``step0`` is step 0 of the same run, and ``auto`` is step 0 if the run has it and
            the first checkpoint otherwise. The first checkpoint's other temperatures are compared with its first one.
        seed: of the bootstrap.
    """
    by_key = {(r.benchmark, label): r for r, label in zip(results, row_labels(results), strict=True)}
    benchmarks, labels = (list(dict.fromkeys(key[place] for key in by_key)) for place in (0, 1))
    # Benchmarks are resampled independently, each with the same draws for every run.
    seeds = {name: seed + zlib.crc32(name.encode(errors="surrogatepass")) for name in benchmarks}
    figures = {key: problem_figures(result) for key, result in by_key.items()}
    baselines = {key: _baseline(key, by_key, compare_to) for key in by_key}
    drawn = {key: resampled(values, seeds[key[0]]) for key, values in figures.items()}
    changes = {key: _changes(figures[key], figures[other]) for key, other in baselines.items() if other}
    drawn_changes = {key: resampled(values, seeds[key[0]]) for key, values in changes.items() if values.size}

    def estimates(keys: Sequence[Key]) -> dict[str, Any]:
        """Return the figures of a run, averaged over the benchmarks of ``keys``, and their differences."""
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
    return Summary(_table(rows), labels, benchmarks, averaged)


def _table(rows: Mapping[Key, Mapping[str, Any]]) -> pd.DataFrame:
    """Return these rows with their columns in the order of ``results.csv``."""
    table = pd.DataFrame(list(rows.values()), index=pd.MultiIndex.from_tuples(rows, names=["benchmark", "run"]))
    ks = sorted(int(column.removeprefix("pass@")) for column in table if re.fullmatch(r"pass@\d+", column))
    names = [f"{name}@{k}" for name in FIGURES if f"{name}@1" in table for k in ks]
    columns = ["baseline", *NUMBERS, *(f"{name}{end}" for name in names for end in ENDS)]
    columns += [f"difference@{k}{end}" for k in ks for end in (*ENDS, "_outside_noise")]
    reasons = {f"reason_{reason}": 0 for reason in REASONS if f"reason_{reason}" in table}
    metrics = [column for column in table if column.endswith(tuple(f"/{group}" for group in GROUPS))]
    table = table.reindex(columns=[*columns, *RATES, *reasons, *metrics] if rows else [])
    return table.fillna(reasons).astype(dict.fromkeys([*NUMBERS, *reasons] if rows else (), int))


def problem_figures(result: TaskResult) -> pd.DataFrame:
    """Return the figures of each problem that has samples, [P, K]; k is 1, 2, 4, ... and the fewest samples of any.

    A problem's name is its index and its question, so that two runs may have been evaluated on different versions.
    """
    problems = [problem for problem in result.problems if problem.samples]
    counts = [len(problem.samples) for problem in problems]
    correct = [[sample.correct for sample in problem.samples] for problem in problems]
    votes = [
        answer_classes(right, [vote_key(sample.answer) for sample in problem.samples])
        for right, problem in zip(correct, problems, strict=True)
    ]
    # A sample that was not generated has no score, and is chosen last.
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
    """Return the baseline of a result on its benchmark; None if it is the baseline itself or there is none."""
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
    """Return the differences of pass@k from the baseline on the problems that both have: ``difference@k``."""
    one, other = figures.filter(like="pass@").align(baseline.filter(like="pass@"), join="inner")
    return (one - other).rename(columns=lambda column: column.replace("pass", "difference"))


def resampled(values: pd.DataFrame, seed: int = 0, draws: int = DRAWS) -> pd.DataFrame:
    """Return each column's mean over problems, and its means over problems drawn with replacement: [1 + draws, K].

    All columns see the same problems. The spread of one problem is unknown: its draws are NaN.
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
    """Return the mean over benchmarks of each column and its percentile interval.

    Args:
        drawn: the :func:`resampled` values of each benchmark; only columns of all count.
        shares: these values, if they lie in [0, 1]. Where those of all problems of a benchmark are the same, as with
            0 of 12 correct, draws do not vary: its part of the interval is then Wilson's (JASA 1927, 22:209), for a
            whole number of problems.

    Returns:
        Column, with one of ``ENDS`` -> value, low, high.
    """
    columns = [column for column in drawn[0] if all(column in part for part in drawn)]
    macro = np.mean([part[columns].to_numpy() for part in drawn], axis=0)
    low, high = np.quantile(macro[1:], [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    for values in shares:
        for place in np.flatnonzero(values[columns].nunique() == 1):
            share, count = values[columns[place]].iloc[0], len(values)
            wilson = binomtest(round(share * count), count).proportion_ci(LEVEL, "wilson")
            # Independent parts of an average add up in squares (Zou and Donner 2008, Statistics in Medicine 27:1693).
            for side, ends, bound in ((-1, low, wilson.low), (1, high, wilson.high)):
                width = math.hypot(ends[place] - macro[0, place], (bound - share) / len(drawn))
                ends[place] = macro[0, place] + side * width
    rows = zip(columns, macro[0].tolist(), low.tolist(), high.tolist(), strict=True)
    return {f"{column}{end}": value for column, *row in rows for end, value in zip(ENDS, row, strict=True)}


def _counts(result: TaskResult) -> dict[str, Any]:
    """Return the numbers of problems and samples, ``RATES``, reasons for verdicts, and mean rank metrics by group."""
    samples = [sample for problem in result.problems for sample in problem.samples]
    counts = [len(problem.samples) for problem in result.problems if problem.samples]
    numbers = (len(counts), len(result.problems) - len(counts), min(counts, default=0), max(counts, default=0))
    generated = [sample for sample in samples if sample.reason != PROMPT_TOO_LONG]
    rates = [[s.num_tokens, s.truncated, repetition_rate(s.response)] for s in generated]
    row = dict(zip(NUMBERS, numbers, strict=True)) | dict(pd.DataFrame(rates, columns=RATES, dtype=np.float64).mean())
    row |= {f"reason_{reason}": count for reason, count in Counter(sample.reason for sample in samples).items()}
    metrics = pd.DataFrame([sample.metrics for sample in samples], dtype=np.float64)
    correct = np.array([sample.correct for sample in samples], dtype=bool)
    for name, values in metrics.where(np.isfinite(metrics)).items():
        means = (values.mean(), values[correct].mean(), values[~correct].mean())
        row |= {f"{name}/{group}": mean for group, mean in zip(GROUPS, means, strict=True)}
    return row


def _average_counts(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sums of numbers and reasons, the fewest and most samples, and the means of ``RATES``."""
    table = pd.DataFrame(rows)
    sums = [*NUMBERS[:2], *(column for column in table if column.startswith("reason_"))]
    lowest, highest = NUMBERS[2:]
    ends = {lowest: table[lowest].min(), highest: table[highest].max()}
    return dict(table[sums].sum()) | ends | dict(table[RATES].mean(skipna=False))


def repetition_rate(text: str, length: int = REPEATED_WORDS) -> float:
    """Return the share of sequences of ``length`` words that occurred before in ``text``; 0 for a shorter text.

    A word is a run of letters and digits, a punctuation mark, or a Chinese or Japanese character.
    """
    words = _WORD.findall(text)
    sequences = len(words) - length + 1
    if sequences < 1:
        return 0.0
    return 1 - len(set(zip(*(words[i:] for i in range(length)), strict=False))) / sequences
