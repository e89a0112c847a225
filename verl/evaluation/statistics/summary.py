"""The figures of an evaluation: one row per run and benchmark, differences between runs, averages over benchmarks.

P: problems that have samples. K: columns, pass@k for each k and then maj@k for each k.
"""

import math
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import fmean

import torch
from torch import Tensor

from verl.evaluation.results import REASONS, RunResult, Sample, metric_names, row_labels
from verl.evaluation.statistics.majority import majority_at_k
from verl.evaluation.statistics.pass_at_k import (
    Estimate,
    bootstrap_means,
    difference_estimates,
    mean_estimates,
    pass_at_k,
    percentile_interval,
)
from verl.rewards.answers import normalise, plain_number

AVERAGE = "macro average"
"""The name that stands in place of a benchmark's for the mean over benchmarks."""

MIN_CHANGED = 6
"""Problems that must differ between two runs before a difference is called outside the noise. Of fewer, all differ in
the same direction more often than once in 20 by chance (2 / 2^5), whatever a bootstrap of so few says."""

REPEATED_WORDS = 4
"""Length of the runs of words whose repetition is counted."""

GROUPS = ("all", "correct", "wrong")
"""The responses over which rank metrics are summarised."""

_WORD = re.compile(r"[^\W\u3040-\u30ff\u3400-\u9fff]+|\S")


@dataclass(frozen=True)
class Difference:
    """How a row differs from its baseline, on the problems that both have."""

    estimate: Estimate
    outside_noise: bool
    """The 95% interval excludes 0, and at least ``MIN_CHANGED`` problems differ."""


@dataclass(frozen=True)
class Spread:
    """A rank metric over some responses; NaN where there are none."""

    count: int
    mean: float
    quartiles: tuple[float, float, float]


@dataclass(frozen=True)
class Row:
    """The figures of one checkpoint on one benchmark, or on the average of several."""

    label: str
    benchmark: str
    num_problems: int
    """Problems with samples; the figures are over these. Of an average: those of all its benchmarks."""
    num_missing: int
    """Problems without samples."""
    samples: tuple[int, int]
    """Fewest and most samples of a problem."""
    pass_at_k: Mapping[int, Estimate]
    """k -> mean over problems; k is 1, 2, 4, ... and the fewest samples of a problem."""
    maj_at_k: Mapping[int, Estimate]
    mean_tokens: float
    """Mean length of responses."""
    truncation_rate: float
    """Share of responses cut at the length limit."""
    repetition_rate: float
    """Mean over responses of :func:`repetition_rate`."""
    reasons: Mapping[str, int] = field(default_factory=dict)
    """Samples by reason for the verdict."""
    metrics: Mapping[str, Mapping[str, Spread]] = field(default_factory=dict)
    """Rank metric -> one of ``GROUPS`` -> its spread."""
    baseline: str | None = None
    """Label of the row that ``differences`` are against."""
    differences: Mapping[int, Difference] = field(default_factory=dict)
    """k -> pass@k of this row minus the baseline's."""

    @property
    def largest_k(self) -> int | None:
        return max(self.pass_at_k, default=None)


@dataclass(frozen=True)
class Summary:
    """All rows: benchmarks in the order in which results name them, and within each the labels in theirs."""

    labels: list[str]
    benchmarks: list[str]
    rows: list[Row]
    averages: list[Row]
    """One per label, over ``averaged``; empty where fewer than two benchmarks are shared by all labels."""
    averaged: list[str]

    def row(self, label: str, benchmark: str) -> Row | None:
        rows = self.averages if benchmark == AVERAGE else self.rows
        return next((row for row in rows if (row.label, row.benchmark) == (label, benchmark)), None)

    def ks(self) -> list[int]:
        """Every k that any row has."""
        return sorted({k for row in self.rows for k in row.pass_at_k})


@dataclass(frozen=True)
class _Scores:
    """The values of a result's problems that have samples."""

    result: RunResult
    label: str
    ks: list[int]
    keys: list[tuple[int, str]]
    """Index and question: what makes problems of two runs the same."""
    values: Tensor
    """``[P, K]``"""
    row: Row

    @property
    def passes(self) -> Tensor:
        return self.values[:, : len(self.ks)]


def summarise(results: Sequence[RunResult], compare_to: str = "auto", seed: int = 0) -> Summary:
    """The figures of ``results``.

    Args:
        results: in the order of the tables.
        compare_to: the row that others are compared with on a benchmark, at the same temperature: of the ``first``
            checkpoint in the list, of ``step0`` of the same run, or ``auto``: of step 0 of the same run where there is
            one and of the first where not. The first checkpoint's other temperatures are compared with its first.
        seed: of the bootstrap.

    Raises:
        ValueError: two results of one checkpoint, benchmark and temperature; unknown ``compare_to``.
    """
    if compare_to not in ("auto", "first", "step0"):
        raise ValueError(f"compare_to={compare_to!r}: must be one of auto, first, step0")
    with one_thread():
        labels = row_labels(results)
        scores = [_scores(result, label, seed) for result, label in zip(results, labels, strict=True)]
        by_benchmark: dict[str, dict[str, _Scores]] = {}
        for score in scores:
            by_benchmark.setdefault(score.result.benchmark, {})[score.label] = score
        first = results[0] if results else None
        rows = []
        for name, group in by_benchmark.items():
            for score in group.values():
                baseline = _baseline(score, list(group.values()), compare_to, first)
                rows.append(_compared(score, baseline, _seed_of(name, seed)))
        shared = [name for name, group in by_benchmark.items() if set(group) == set(labels) and _complete(group)]
        averages = []
        if len(shared) > 1:
            for label in dict.fromkeys(labels):
                averages.append(_average(label, [by_benchmark[name] for name in shared], compare_to, first, seed))
        return Summary(list(dict.fromkeys(labels)), list(by_benchmark), rows, averages, shared if averages else [])


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep torch to one thread: the tensors here are small, and threads that wait for each other cost more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def k_grid(num_samples: int) -> list[int]:
    """1, 2, 4, ... below ``num_samples``, and ``num_samples``."""
    return [1 << i for i in range(num_samples.bit_length()) if 1 << i < num_samples] + [num_samples] * (num_samples > 0)


def answer_classes(samples: Sequence[Sample]) -> tuple[list[int], int | None]:
    """Ids for a vote: one per sample, and that of the correct answer (None where no sample is correct).

    Correct samples are one class: their answers equal the reference answer. The others are grouped by their answer's
    text without what does not change its meaning, plain numbers by value; a wrong sample without an answer is -1.
    """
    ids: dict[object, int] = {}
    classes = []
    for sample in samples:
        if sample.correct:
            classes.append(0)
            continue
        text = normalise(sample.answer.strip())
        number = plain_number(text)
        key = text if number is None else number
        classes.append(ids.setdefault(key, len(ids) + 1) if text else -1)
    return classes, 0 if 0 in classes else None


def repetition_rate(text: str, length: int = REPEATED_WORDS) -> float:
    """Share of the runs of ``length`` words that occurred before in ``text``; 0 where there are none.

    A word is a run of letters and digits, a punctuation mark, or a Chinese or Japanese character.
    """
    words = _WORD.findall(text)
    runs = len(words) - length + 1
    if runs < 1:
        return 0.0
    return 1 - len(set(zip(*(words[i:] for i in range(length)), strict=False))) / runs


def metric_spreads(result: RunResult) -> dict[str, dict[str, Spread]]:
    """Every rank metric of ``result`` over all, correct and wrong responses."""
    return {
        name: {group: _spread(values) for group, values in metric_values(result, name).items()}
        for name in metric_names(result.problems)
    }


def metric_values(result: RunResult, name: str) -> dict[str, list[float]]:
    """The finite values of a rank metric over all, correct and wrong responses."""
    found = [
        (sample.metrics[name], sample.correct)
        for problem in result.problems
        for sample in problem.samples
        if math.isfinite(sample.metrics.get(name, math.nan))
    ]
    return {
        "all": [value for value, _ in found],
        "correct": [value for value, correct in found if correct],
        "wrong": [value for value, correct in found if not correct],
    }


def _spread(values: list[float]) -> Spread:
    if not values:
        return Spread(0, math.nan, (math.nan,) * 3)
    ordered = torch.tensor(values, dtype=torch.float64).sort().values
    # torch.quantile refuses more than 2^24 values; the nearest rank is exact enough for a spread.
    low, middle, high = (float(ordered[round(q * (len(ordered) - 1))]) for q in (0.25, 0.5, 0.75))
    return Spread(len(values), fmean(values), (low, middle, high))


def _scores(result: RunResult, label: str, seed: int) -> _Scores:
    """Every figure of one result that needs no other."""
    problems = [problem for problem in result.problems if problem.samples]
    samples = [sample for problem in problems for sample in problem.samples]
    counts = [len(problem.samples) for problem in problems]
    ks = k_grid(min(counts, default=0))
    n = torch.tensor(counts)
    correct = torch.tensor([sum(sample.correct for sample in problem.samples) for problem in problems])
    votes = [answer_classes(problem.samples) for problem in problems]
    columns = [pass_at_k(n, correct, k) for k in ks]
    columns += [torch.tensor([majority_at_k(*vote, k) for vote in votes], dtype=torch.float64) for k in ks]
    values = torch.stack(columns, dim=1) if ks else torch.zeros(0, 0, dtype=torch.float64)
    estimates = mean_estimates(values, seed=_seed_of(result.benchmark, seed)) if ks else []
    reasons = Counter(sample.reason for sample in samples)
    row = Row(
        label=label,
        benchmark=result.benchmark,
        num_problems=len(problems),
        num_missing=len(result.problems) - len(problems),
        samples=(min(counts, default=0), max(counts, default=0)),
        pass_at_k=dict(zip(ks, estimates[: len(ks)], strict=True)),
        maj_at_k=dict(zip(ks, estimates[len(ks) :], strict=True)),
        mean_tokens=fmean(sample.num_tokens for sample in samples) if samples else math.nan,
        truncation_rate=fmean(sample.truncated for sample in samples) if samples else math.nan,
        repetition_rate=fmean(repetition_rate(sample.response) for sample in samples) if samples else math.nan,
        reasons={reason: reasons[reason] for reason in dict.fromkeys([*REASONS, *reasons]) if reasons[reason]},
        metrics=metric_spreads(result),
    )
    return _Scores(result, label, ks, [(p.index, p.question) for p in problems], values, row)


def _seed_of(benchmark: str, seed: int) -> int:
    """Benchmarks are drawn independently, each with the same draws for every run."""
    return zlib.crc32(benchmark.encode(errors="surrogatepass")) + seed


def _complete(group: Mapping[str, _Scores]) -> bool:
    return all(score.ks for score in group.values())


def _baseline(score: _Scores, group: Sequence[_Scores], compare_to: str, first: RunResult | None) -> _Scores | None:
    """Whom ``score`` is compared with on its benchmark; None for the baseline itself, and where there is none."""

    def results_of(run: str, step: int) -> list[_Scores]:
        return [other for other in group if (other.result.run, other.result.step) == (run, step)]

    def as_warm(others: list[_Scores]) -> list[_Scores]:
        return [other for other in others if other.result.temperature == score.result.temperature]

    mine = score.result
    untrained = as_warm(results_of(mine.run, 0))
    if untrained and compare_to != "first" and mine.step != 0:
        return untrained[0]
    if compare_to == "step0" or first is None:
        return None
    leading = results_of(first.run, first.step)
    if (mine.run, mine.step) != (first.run, first.step):
        leading = as_warm(leading)
    return leading[0] if leading and leading[0] is not score else None


def _paired(score: _Scores, baseline: _Scores) -> tuple[list[int], Tensor, Tensor]:
    """The k that both have, and pass@k ``[P, K]`` of ``score`` and of ``baseline`` on the problems that both have."""
    ks = [k for k in score.ks if k in baseline.ks]
    place = {key: i for i, key in enumerate(baseline.keys)}
    pairs = [(i, place[key]) for i, key in enumerate(score.keys) if key in place]
    mine, theirs = [i for i, _ in pairs], [i for _, i in pairs]
    own = score.passes[mine][:, [score.ks.index(k) for k in ks]]
    return ks, own, baseline.passes[theirs][:, [baseline.ks.index(k) for k in ks]]


def _compared(score: _Scores, baseline: _Scores | None, seed: int) -> Row:
    """The row of ``score`` with its differences."""
    if baseline is None:
        return score.row
    ks, own, other = _paired(score, baseline)
    if not ks or not len(own):
        return score.row
    estimates = difference_estimates(other, own, seed=seed)
    return _with_differences(score.row, baseline.label, ks, estimates, (own != other).sum(dim=0).tolist())


def _with_differences(
    row: Row, baseline: str, ks: Sequence[int], estimates: Sequence[Estimate], changed: Sequence[int]
) -> Row:
    """``row`` compared with the row labelled ``baseline``; ``changed``: problems that differ, per k."""
    differences = {}
    for k, estimate, count in zip(ks, estimates, changed, strict=True):
        excludes_zero = estimate.low > 0 or estimate.high < 0
        differences[k] = Difference(estimate, excludes_zero and count >= MIN_CHANGED)
    return replace(row, baseline=baseline, differences=differences)


def _average(
    label: str, groups: Sequence[Mapping[str, _Scores]], compare_to: str, first: RunResult | None, seed: int
) -> Row:
    """The mean over benchmarks of the figures of ``label``, every benchmark with the same weight."""
    scores = [group[label] for group in groups]
    rows = [score.row for score in scores]
    ks = [k for k in scores[0].ks if all(k in score.ks for score in scores)]
    columns = [[score.ks.index(k) for k in ks] for score in scores]
    columns = [own + [len(score.ks) + i for i in own] for own, score in zip(columns, scores, strict=True)]
    estimates = _mean_of_means([score.values[:, own] for score, own in zip(scores, columns, strict=True)], rows, seed)
    row = Row(
        label=label,
        benchmark=AVERAGE,
        num_problems=sum(row.num_problems for row in rows),
        num_missing=sum(row.num_missing for row in rows),
        samples=(min(row.samples[0] for row in rows), max(row.samples[1] for row in rows)),
        pass_at_k=dict(zip(ks, estimates[: len(ks)], strict=True)),
        maj_at_k=dict(zip(ks, estimates[len(ks) :], strict=True)),
        mean_tokens=fmean(row.mean_tokens for row in rows),
        truncation_rate=fmean(row.truncation_rate for row in rows),
        repetition_rate=fmean(row.repetition_rate for row in rows),
        reasons=sum((Counter(row.reasons) for row in rows), Counter()),
    )
    baselines = [_baseline(s, list(group.values()), compare_to, first) for s, group in zip(scores, groups, strict=True)]
    if any(other is None or other.label != baselines[0].label for other in baselines):
        return row
    paired = [_paired(score, baseline) for score, baseline in zip(scores, baselines, strict=True)]
    if any(not len(own) for _, own, _ in paired):
        return row
    ks = [k for k in paired[0][0] if all(k in shared for shared, _, _ in paired)]
    changes = [(own - other)[:, [shared.index(k) for k in ks]] for shared, own, other in paired]
    changed = sum((change != 0).sum(dim=0) for change in changes).tolist()
    return _with_differences(row, baselines[0].label, ks, _mean_of_means(changes, rows, seed), changed)


def _mean_of_means(values: Sequence[Tensor], rows: Sequence[Row], seed: int) -> list[Estimate]:
    """The mean over benchmarks of the means over their problems, ``[P, K]`` each; problems are drawn per benchmark.

    Of a benchmark with one problem nobody knows how far others would be off, so its average has no interval.
    """
    means = torch.stack([v.mean(dim=0) for v in values]).mean(dim=0)
    draws = [bootstrap_means(v, seed=_seed_of(row.benchmark, seed)) for v, row in zip(values, rows, strict=True)]
    low, high = percentile_interval(torch.stack(draws).mean(dim=0))
    if any(len(v) == 1 for v in values):
        low, high = torch.full_like(low, math.nan), torch.full_like(high, math.nan)
    return [Estimate(*row) for row in torch.stack([means, low, high], dim=1).tolist()]
