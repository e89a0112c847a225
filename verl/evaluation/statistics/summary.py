"""The figures of an evaluation: a row per checkpoint and benchmark, differences between rows, averages over benchmarks.

P: problems with samples. K: columns, pass@k for each k and then maj@k for each k.
"""

import math
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import fmean

import torch
from torch import Tensor

from verl.evaluation.results import PROMPT_TOO_LONG, REASONS, TaskResult, row_labels
from verl.evaluation.statistics.bootstrap import Estimate, macro_estimates, mean_estimates
from verl.evaluation.statistics.responses import Spread, metric_spreads, repetition_rate
from verl.rewards.majority import answer_classes, majority_at_k
from verl.rewards.pass_at_k import k_grid, pass_at_k

AVERAGE = "macro average"
"""The benchmark of rows that hold the mean over benchmarks."""

MIN_CHANGED = 6
"""Problems that must differ between two runs before a difference can be outside the noise. Fewer problems all differ in
the same direction by chance more often than once in 20 (2 / 2^5), whatever a bootstrap of so few says."""


@dataclass(frozen=True)
class Difference:
    """The difference of a row from its baseline, on the problems that both have."""

    estimate: Estimate
    outside_noise: bool
    """The 95% interval excludes 0, and at least ``MIN_CHANGED`` problems differ."""


@dataclass(frozen=True)
class SummaryRow:
    """The figures of one checkpoint on one benchmark, or averaged over several."""

    label: str
    benchmark: str
    num_problems: int
    """Problems with samples, over which the figures are; of an average, those of all its benchmarks."""
    num_missing: int
    """Problems without samples."""
    samples: tuple[int, int]
    """Fewest and most samples of a problem."""
    pass_at_k: Mapping[int, Estimate]
    """k -> mean over problems; k is 1, 2, 4, ... and the fewest samples that a problem has."""
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
    """Label of the row that this row is compared with."""
    differences: Mapping[int, Difference] = field(default_factory=dict)
    """k -> pass@k of this row minus the baseline's."""

    @property
    def largest_k(self) -> int | None:
        return max(self.pass_at_k, default=None)


@dataclass(frozen=True)
class Summary:
    """All rows, by benchmark and then by label, both in the order of the results."""

    labels: list[str]
    benchmarks: list[str]
    rows: list[SummaryRow]
    averages: list[SummaryRow]
    """One per label, over ``averaged``; empty if all labels share fewer than two benchmarks."""
    averaged: list[str]

    def row(self, label: str, benchmark: str) -> SummaryRow | None:
        rows = self.averages if benchmark == AVERAGE else self.rows
        return next((row for row in rows if (row.label, row.benchmark) == (label, benchmark)), None)

    def ks(self) -> list[int]:
        """Every k that some row has."""
        return sorted({k for row in self.rows for k in row.pass_at_k})

    def reasons(self) -> list[str]:
        """Every reason that some row has."""
        return list(dict.fromkeys(reason for row in self.rows for reason in row.reasons))


@dataclass(frozen=True)
class _Scores:
    """The values of one result on its problems that have samples."""

    result: TaskResult
    label: str
    ks: list[int]
    problems: list[tuple[int, str]]
    """Index and question: what makes problems of two runs the same."""
    values: Tensor
    """``[P, K]``"""
    row: SummaryRow

    def columns(self, ks: Sequence[int]) -> Tensor:
        """The columns of ``ks``: pass@k and then maj@k, ``[P, 2 * len(ks)]``."""
        places = [self.ks.index(k) for k in ks]
        return self.values[:, places + [len(self.ks) + place for place in places]]


def summarise(results: Sequence[TaskResult], compare_to: str = "auto", seed: int = 0) -> Summary:
    """The figures of ``results``.

    Args:
        results: in the order of the tables.
        compare_to: the baseline of a row, on the same benchmark and at the same temperature: ``first`` is the first
            checkpoint in the list, ``step0`` is step 0 of the same run, and ``auto`` is step 0 if the run has it and
            the first checkpoint otherwise. The first checkpoint's other temperatures are compared with its first one.
        seed: of the bootstrap.

    Raises:
        ValueError: two results of one checkpoint, benchmark and temperature; unknown ``compare_to``.
    """
    if compare_to not in ("auto", "first", "step0"):
        raise ValueError(f"compare_to={compare_to!r}: must be one of auto, first, step0")
    with one_thread():
        labels = row_labels(results)
        benchmarks: dict[str, dict[str, _Scores]] = {}
        for result, label in zip(results, labels, strict=True):
            benchmarks.setdefault(result.benchmark, {})[label] = _scores(result, label, seed)
        pairs = {
            name: {label: (scores, _baseline(scores, group, compare_to, results[0])) for label, scores in group.items()}
            for name, group in benchmarks.items()
        }
        rows = [_compared(pair[0].row, [pair], seed) for group in pairs.values() for pair in group.values()]
        labels = list(dict.fromkeys(labels))
        shared = [
            name
            for name, group in benchmarks.items()
            if group.keys() == set(labels) and all(scores.ks for scores in group.values())
        ]
        if len(shared) < 2:
            return Summary(labels, list(benchmarks), rows, [], [])
        averages = [_average(label, [pairs[name][label] for name in shared], seed) for label in labels]
        return Summary(labels, list(benchmarks), rows, averages, shared)


def rows_of(results: Sequence[TaskResult], summary: Summary) -> list[tuple[TaskResult, SummaryRow]]:
    """Every result with its row in the summary of ``results``."""
    rows = {(row.label, row.benchmark): row for row in summary.rows}
    labels = row_labels(results)
    return [(result, rows[label, result.benchmark]) for result, label in zip(results, labels, strict=True)]


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch to one thread: for tensors this small, threads that wait for each other cost more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _scores(result: TaskResult, label: str, seed: int) -> _Scores:
    """The figures of one result, without its differences."""
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
    responses = [sample for sample in samples if sample.reason != PROMPT_TOO_LONG]
    reasons = Counter(sample.reason for sample in samples)
    row = SummaryRow(
        label=label,
        benchmark=result.benchmark,
        num_problems=len(problems),
        num_missing=len(result.problems) - len(problems),
        samples=(min(counts, default=0), max(counts, default=0)),
        pass_at_k=dict(zip(ks, estimates[: len(ks)], strict=True)),
        maj_at_k=dict(zip(ks, estimates[len(ks) :], strict=True)),
        mean_tokens=fmean(sample.num_tokens for sample in responses) if responses else math.nan,
        truncation_rate=fmean(sample.truncated for sample in responses) if responses else math.nan,
        repetition_rate=fmean(repetition_rate(sample.response) for sample in responses) if responses else math.nan,
        reasons={reason: reasons[reason] for reason in dict.fromkeys([*REASONS, *reasons]) if reasons[reason]},
        metrics=metric_spreads(result.problems),
    )
    return _Scores(result, label, ks, [(p.index, p.question) for p in problems], values, row)


def _seed_of(benchmark: str, seed: int) -> int:
    """Benchmarks are resampled independently, each with the same draws for every run."""
    return zlib.crc32(benchmark.encode(errors="surrogatepass")) + seed


def _baseline(scores: _Scores, group: Mapping[str, _Scores], compare_to: str, first: TaskResult) -> _Scores | None:
    """The baseline of ``scores`` on its benchmark; None if it is the baseline itself or there is none."""
    result = scores.result

    def find(run: str, step: int, temperatures: set[float]) -> _Scores | None:
        of_checkpoint = [s for s in group.values() if (s.result.run, s.result.step) == (run, step)]
        return next((s for s in of_checkpoint if s.result.temperature in temperatures), None)

    if compare_to != "first" and result.step != 0:
        untrained = find(result.run, 0, {result.temperature})
        if untrained is not None:
            return untrained
    if compare_to == "step0":
        return None
    of_first = (result.run, result.step) == (first.run, first.step)
    temperatures = {s.result.temperature for s in group.values()} if of_first else {result.temperature}
    leading = find(first.run, first.step, temperatures)
    return None if leading is scores else leading


def _compared(row: SummaryRow, pairs: Sequence[tuple[_Scores, _Scores | None]], seed: int) -> SummaryRow:
    """``row`` with its differences. ``pairs``: for each of its benchmarks, its values and those of the baseline."""
    compared = [(scores, baseline) for scores, baseline in pairs if baseline is not None]
    labels = {baseline.label for _, baseline in compared}
    if len(compared) < len(pairs) or len(labels) != 1:
        return row
    ks = [k for k in compared[0][0].ks if all(k in scores.ks and k in baseline.ks for scores, baseline in compared)]
    changes = [_changes(scores, baseline, ks) for scores, baseline in compared]
    if not ks or not all(len(change) for change in changes):
        return row
    estimates = macro_estimates(changes, [_seed_of(scores.result.benchmark, seed) for scores, _ in compared])
    num_changed = (torch.cat(changes) != 0).sum(dim=0).tolist()
    differences = {}
    for k, estimate, count in zip(ks, estimates, num_changed, strict=True):
        excludes_zero = estimate.low > 0 or estimate.high < 0
        differences[k] = Difference(estimate, excludes_zero and count >= MIN_CHANGED)
    return replace(row, baseline=labels.pop(), differences=differences)


def _changes(scores: _Scores, baseline: _Scores, ks: Sequence[int]) -> Tensor:
    """Differences of pass@k from the baseline, on the problems that both have: ``[P, len(ks)]``."""
    places = {problem: i for i, problem in enumerate(baseline.problems)}
    both = [(i, places[problem]) for i, problem in enumerate(scores.problems) if problem in places]
    values, baselines = scores.columns(ks), baseline.columns(ks)
    return (values[[i for i, _ in both]] - baselines[[i for _, i in both]])[:, : len(ks)]


def _average(label: str, pairs: Sequence[tuple[_Scores, _Scores | None]], seed: int) -> SummaryRow:
    """The mean over benchmarks of the figures of ``label``; every benchmark has the same weight."""
    parts = [scores for scores, _ in pairs]
    rows = [scores.row for scores in parts]
    ks = [k for k in parts[0].ks if all(k in scores.ks for scores in parts)]
    seeds = [_seed_of(row.benchmark, seed) for row in rows]
    estimates = macro_estimates([scores.columns(ks) for scores in parts], seeds)
    row = SummaryRow(
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
    return _compared(row, pairs, seed)
