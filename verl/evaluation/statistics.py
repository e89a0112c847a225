"""The figures of an evaluation: a row per checkpoint and benchmark, differences between rows, averages over benchmarks.

P: problems with samples. K: columns, those of ``FIGURES`` one after another, each for every k. D: bootstrap draws.
"""

import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import NormalDist, fmean
from typing import Any

import torch
from torch import Tensor

from verl.algorithms.pass_at_k import k_grid, pass_at_k, rm_at_k
from verl.algorithms.votes import answer_classes, majority_at_k, weighted_majority_at_k
from verl.evaluation.results import PROMPT_TOO_LONG, REASONS, ProblemResult, TaskResult, metric_names, row_labels
from verl.verifiers.answers import vote_key

DRAWS = 4000
"""Resamplings per interval. The ends of a 95% interval are then usually less than half a percentile off."""

LEVEL = 0.95
"""Share of intervals that contain the true value."""

MAX_BLOCK = 1 << 22
"""Problems times draws that are resampled at once: 32 MiB."""

REPEATED_WORDS = 4
"""Length of the word sequences whose repetition is counted."""

GROUPS = {"all": {True, False}, "correct": {True}, "wrong": {False}}
"""The responses over which rank metrics are summarised -> whether these are correct."""

FIGURES = ("pass", "maj", "rm", "rm_maj")
"""``pass@k`` and the like; the last two where a reward model scored the samples."""

AVERAGE = "macro average"
"""The benchmark of rows that hold the mean over benchmarks."""

MIN_CHANGED = 6
"""Problems that must differ between two runs before a difference can be outside the noise. Fewer problems all differ in
the same direction by chance more often than once in 20 (2 / 2^5), whatever a bootstrap of so few says."""

_WORD = re.compile(r"[^\W\u3040-\u30ff\u3400-\u9fff]+|\S")


@dataclass(frozen=True)
class Estimate:
    """A mean over problems and its interval; the bounds are NaN if there was only one problem."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Spread:
    """A rank metric over some responses; NaN if there are none."""

    count: int
    mean: float
    quartiles: tuple[float, float, float]


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
    rm_at_k: Mapping[int, Estimate] = field(default_factory=dict)
    """Empty without a reward model, as the next."""
    rm_maj_at_k: Mapping[int, Estimate] = field(default_factory=dict)

    def estimates(self, name: str) -> Mapping[int, Estimate]:
        """Estimates of one of ``FIGURES``."""
        estimates: Mapping[int, Estimate] = getattr(self, f"{name}_at_k")
        return estimates


@dataclass(frozen=True)
class Summary:
    """All rows, by benchmark and then by label, both in the order of the results."""

    labels: list[str]
    benchmarks: list[str]
    rows: list[SummaryRow]
    averages: list[SummaryRow]
    """One per label, over ``averaged``; empty if all labels share fewer than two benchmarks."""
    averaged: list[str]

    @property
    def all_rows(self) -> list[SummaryRow]:
        """The rows of all benchmarks and then the averages."""
        return [*self.rows, *self.averages]

    def row(self, label: str, benchmark: str) -> SummaryRow | None:
        return next((row for row in self.all_rows if (row.label, row.benchmark) == (label, benchmark)), None)

    def ks(self) -> list[int]:
        """Every k that some row has."""
        return sorted({k for row in self.rows for k in row.pass_at_k})

    def figures(self) -> list[str]:
        """Entries of ``FIGURES`` that some row has."""
        return [name for name in FIGURES if any(row.estimates(name) for row in self.rows)]

    def reasons(self) -> list[str]:
        """Every reason that some row has."""
        return list(dict.fromkeys(reason for row in self.rows for reason in row.reasons))


@dataclass(frozen=True)
class _Scores:
    """The values of one result on its problems that have samples."""

    result: TaskResult
    row: SummaryRow
    problems: list[tuple[int, str]]
    """Index and question: what makes problems of two runs the same."""
    values: Tensor
    """``[P, K]``"""

    def columns(self, ks: Sequence[int]) -> Tensor:
        """Return the columns of ``ks``, ``[P, F * len(ks)]`` for F figures."""
        known = list(self.row.pass_at_k)
        starts = range(0, self.values.shape[1], max(1, len(known)))
        return self.values[:, [start + known.index(k) for start in starts for k in ks]]


def summarise(results: Sequence[TaskResult], compare_to: str = "auto", seed: int = 0) -> Summary:
    """Summarise ``results``.

    Args:
        results: in the order of the tables.
        compare_to: the baseline of a row, on the same benchmark and at the same temperature: ``first`` is the first
            checkpoint in the list, ``step0`` is step 0 of the same run, and ``auto`` is step 0 if the run has it and
            the first checkpoint otherwise. The first checkpoint's other temperatures are compared with its first one.
        seed: of the bootstrap.
    """
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
        # Those of all labels, where every one has a figure.
        shared = [
            name
            for name, group in benchmarks.items()
            if group.keys() == set(labels) and all(scores.row.pass_at_k for scores in group.values())
        ]
        shared = shared if len(shared) > 1 else []
        averages = [_average(label, [pairs[name][label] for name in shared], seed) for label in labels if shared]
        return Summary(labels, list(benchmarks), rows, averages, shared)


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
    """Return the figures of one result, without its differences."""
    problems = [problem for problem in result.problems if problem.samples]
    samples = [sample for problem in problems for sample in problem.samples]
    counts = [len(problem.samples) for problem in problems]
    ks = k_grid(min(counts, default=0))
    n = torch.tensor(counts)
    correct = torch.tensor([sum(sample.correct for sample in problem.samples) for problem in problems])
    votes = [answer_classes([s.correct for s in p.samples], [vote_key(s.answer) for s in p.samples]) for p in problems]
    columns = [pass_at_k(n, correct, k) for k in ks]
    by_problem: list[Callable[[int], list[float]]] = [lambda k: [majority_at_k(*vote, k) for vote in votes]]
    if any(sample.score is not None for sample in samples):
        # A sample that was not generated is chosen last.
        scores = [[math.nan if s.score is None else s.score for s in p.samples] for p in problems]
        judged = [([s.correct for s in p.samples], given) for p, given in zip(problems, scores, strict=True)]
        weighed = [(*vote, given) for vote, given in zip(votes, scores, strict=True)]
        by_problem.append(lambda k: [rm_at_k(*pair, k) for pair in judged])
        by_problem.append(lambda k: [weighted_majority_at_k(*vote, k) for vote in weighed])
    columns += [torch.tensor(figure(k), dtype=torch.float64) for figure in by_problem for k in ks]
    values = torch.stack(columns, dim=1) if ks else torch.zeros(0, 0, dtype=torch.float64)
    estimates = macro_estimates([values], [_seed_of(result.benchmark, seed)], shares=True) if ks else []
    responses = [sample for sample in samples if sample.reason != PROMPT_TOO_LONG]
    reasons = Counter(sample.reason for sample in samples)
    row = SummaryRow(
        label=label,
        benchmark=result.benchmark,
        num_problems=len(problems),
        num_missing=len(result.problems) - len(problems),
        samples=(min(counts, default=0), max(counts, default=0)),
        **_by_figure(ks, estimates),
        mean_tokens=_mean([sample.num_tokens for sample in responses]),
        truncation_rate=_mean([sample.truncated for sample in responses]),
        repetition_rate=_mean([repetition_rate(sample.response) for sample in responses]),
        reasons={reason: reasons[reason] for reason in dict.fromkeys([*REASONS, *reasons]) if reasons[reason]},
        metrics=metric_spreads(result.problems),
    )
    return _Scores(result, row, [(p.index, p.question) for p in problems], values)


def _by_figure(ks: Sequence[int], estimates: Sequence[Estimate]) -> dict[str, Any]:
    """``pass_at_k`` and so on of a row; ``estimates``: for each figure one for each of ``ks``."""
    of_figure = [dict(zip(ks, estimates[len(ks) * i :], strict=False)) for i in range(len(FIGURES))]
    return {f"{name}_at_k": found for name, found in zip(FIGURES, of_figure, strict=True)}


def _seed_of(benchmark: str, seed: int) -> int:
    """Benchmarks are resampled independently, each with the same draws for every run."""
    return zlib.crc32(benchmark.encode(errors="surrogatepass")) + seed


def _baseline(scores: _Scores, group: Mapping[str, _Scores], compare_to: str, first: TaskResult) -> _Scores | None:
    """Return the baseline of ``scores`` on its benchmark; None if it is the baseline itself or there is none."""
    result = scores.result
    same = [other for other in group.values() if other.result.temperature == result.temperature]
    others = [other for other in same if other.result.label == f"{result.run}@0"] if compare_to != "first" else []
    if compare_to != "step0" and (result.step == 0 or not others):
        among = group.values() if result.label == first.label else same
        others = [other for other in among if other.result.label == first.label]
    baseline = next(iter(others), None)
    return None if baseline is scores else baseline


def _compared(row: SummaryRow, pairs: Sequence[tuple[_Scores, _Scores | None]], seed: int) -> SummaryRow:
    """``row`` with its differences. ``pairs``: for each of its benchmarks, its values and those of the baseline."""
    compared = [(scores, baseline) for scores, baseline in pairs if baseline is not None]
    labels = {baseline.row.label for _, baseline in compared}
    if len(compared) < len(pairs) or len(labels) != 1:
        return row
    ks = _shared_ks([scores for pair in compared for scores in pair])
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
    changes = scores.columns(ks)[[i for i, _ in both]] - baseline.columns(ks)[[i for _, i in both]]
    return changes[:, : len(ks)]


def _shared_ks(parts: Sequence[_Scores]) -> list[int]:
    return [k for k in parts[0].row.pass_at_k if all(k in scores.row.pass_at_k for scores in parts)]


def _average(label: str, pairs: Sequence[tuple[_Scores, _Scores | None]], seed: int) -> SummaryRow:
    """Return the mean over benchmarks of the figures of ``label``; every benchmark has the same weight."""
    parts = [scores for scores, _ in pairs]
    rows = [scores.row for scores in parts]
    ks = _shared_ks(parts)
    seeds = [_seed_of(row.benchmark, seed) for row in rows]
    columns = [scores.columns(ks) for scores in parts]
    width = min(values.shape[1] for values in columns)
    estimates = macro_estimates([values[:, :width] for values in columns], seeds, shares=True)
    row = SummaryRow(
        label=label,
        benchmark=AVERAGE,
        num_problems=sum(row.num_problems for row in rows),
        num_missing=sum(row.num_missing for row in rows),
        samples=(min(row.samples[0] for row in rows), max(row.samples[1] for row in rows)),
        **_by_figure(ks, estimates),
        mean_tokens=fmean(row.mean_tokens for row in rows),
        truncation_rate=fmean(row.truncation_rate for row in rows),
        repetition_rate=fmean(row.repetition_rate for row in rows),
        reasons=sum((Counter(row.reasons) for row in rows), Counter()),
    )
    return _compared(row, pairs, seed)


def bootstrap_means(values: Tensor, num_draws: int = DRAWS, seed: int = 0) -> Tensor:
    """Means over problems drawn with replacement: ``values [P, K]`` -> float64 ``[D, K]``.

    All columns share the draws. To compare two runs on the same problems, pass the differences.
    """
    num_problems = len(values)
    generator = torch.Generator().manual_seed(seed)
    block = max(1, min(num_draws, MAX_BLOCK // num_problems))
    means = []
    for start in range(0, num_draws, block):
        draws = min(block, num_draws - start)
        drawn = torch.randint(num_problems, (draws, num_problems), generator=generator)
        times = torch.zeros(draws, num_problems, dtype=torch.float64)
        times.scatter_add_(1, drawn, torch.ones_like(times))
        means.append(times @ values.double() / num_problems)
    return torch.cat(means)


def mean_estimates(values: Tensor, num_draws: int = DRAWS, seed: int = 0) -> list[Estimate]:
    """Mean and percentile bootstrap interval of each column of ``values [P, K]``."""
    return macro_estimates([values], [seed], num_draws)


def macro_estimates(
    benchmarks: Sequence[Tensor], seeds: Sequence[int], num_draws: int = DRAWS, shares: bool = False
) -> list[Estimate]:
    """Return the mean over benchmarks of their means over problems, ``[P, K]`` each, with intervals per column.

    Problems are drawn within each benchmark, by its seed. The spread within a benchmark of one problem is unknown, so
    its average has no interval.

    Args:
        shares: values lie in [0, 1]. Where those of a benchmark's problems are all the same, as with 0 of 12 correct,
            draws do not vary: its part of the interval is then Wilson's.
    """
    means = torch.stack([values.double().mean(dim=0) for values in benchmarks]).mean(dim=0)
    if any(len(values) == 1 for values in benchmarks):
        return [Estimate(mean, math.nan, math.nan) for mean in means.tolist()]
    draws = [bootstrap_means(values, num_draws, seed) for values, seed in zip(benchmarks, seeds, strict=True)]
    ends = torch.tensor([(1 - LEVEL) / 2, (1 + LEVEL) / 2], dtype=torch.float64)
    low, high = torch.stack(draws).mean(dim=0).quantile(ends, dim=0)
    for values in benchmarks if shares else ():
        constant = values.amax(dim=0) == values.amin(dim=0)
        # Independent parts of an average add up in squares (Zou and Donner 2008, Statistics in Medicine 27:1693).
        parts = [(values[0].double() - bound) / len(benchmarks) for bound in wilson_interval(values[0], len(values))]
        low, high = (
            torch.where(constant, means + torch.hypot(end - means, part) * side, end)
            for end, part, side in zip((low, high), parts, (-1, 1), strict=True)
        )
    return [Estimate(*row) for row in torch.stack([means, low, high], dim=1).tolist()]


def wilson_interval(share: Tensor, num_problems: int) -> tuple[Tensor, Tensor]:
    """Wilson's score interval of a share ``[K]`` of ``num_problems`` (JASA 1927, 22:209), at ``LEVEL``."""
    z = NormalDist().inv_cdf((1 + LEVEL) / 2)
    scale = 1 + z**2 / num_problems
    centre = (share.double() + z**2 / (2 * num_problems)) / scale
    half = z * (share.double() * (1 - share.double()) / num_problems + z**2 / (4 * num_problems**2)).sqrt() / scale
    # Exact at both ends, where rounding would leave 1e-17 on either side.
    low, high = (centre - half).clamp(min=0), (centre + half).clamp(max=1)
    return low.masked_fill(share == 0, 0.0), high.masked_fill(share == 1, 1.0)


def repetition_rate(text: str, length: int = REPEATED_WORDS) -> float:
    """Share of the sequences of ``length`` words that occurred before in ``text``; 0 for a shorter text.

    A word is a run of letters and digits, a punctuation mark, or a Chinese or Japanese character.
    """
    words = _WORD.findall(text)
    sequences = len(words) - length + 1
    if sequences < 1:
        return 0.0
    return 1 - len(set(zip(*(words[i:] for i in range(length)), strict=False))) / sequences


def metric_spreads(problems: Sequence[ProblemResult]) -> dict[str, dict[str, Spread]]:
    """Every rank metric's finite values over all, correct and wrong responses."""
    spreads = {}
    for name in metric_names(problems):
        found = [(s.metrics.get(name, math.nan), s.correct) for p in problems for s in p.samples]
        spreads[name] = {
            group: _spread([value for value, correct in found if correct in members and math.isfinite(value)])
            for group, members in GROUPS.items()
        }
    return spreads


def _spread(values: list[float]) -> Spread:
    ordered = sorted(values) or [math.nan]
    # The nearest rank is exact enough for a spread.
    low, middle, high = (ordered[round(q * (len(ordered) - 1))] for q in (0.25, 0.5, 0.75))
    return Spread(len(values), _mean(values), (low, middle, high))


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else math.nan
