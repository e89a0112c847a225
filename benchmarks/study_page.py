"""The page and the figure of a study (benchmarks/study.py), which follow from its results."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_report import table
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from scipy.optimize import brentq
from scipy.stats import bootstrap, nct
from scipy.stats import t as student
from study_file import Arm, Study
from torch import Tensor

from verl.algorithms.pass_at_k import pass_at_k
from verl.analysis.drawing import STYLE
from verl_pages.colours import COLOURS

POWER, LEVEL = 0.8, 0.05
"""How often a detectable difference would be found, and how often one would be where there is none."""

DRAWS = 4000
"""Resamplings of the problems for an interval."""

ROUNDING = 1e-12
"""What differs by less is equal."""

LOGGED = {
    "reward": "train/pass@1",
    "shaped_share": "reward_manager/shaped_token_share",
    "shaped_change": "reward_manager/shaped_relative_change",
    "entropy": "actor/entropy",
    "seconds": "timing_s/step",
}
"""What is kept of a run's log -> its name there."""

COUNTS = ("answers", "tokens")
"""Counts of each problem in a run's results: different answers, and tokens of all samples."""

RATES = """\
Pass rates are means over seeds, with 95% bootstrap intervals over problems. Differences are in percentage points and
paired by seed.
"""
DRAWN = "Each seed draws its own test problems, the same for all arms."
TESTS = """\
Their 95% intervals and p are over {over}, by t tests with one deviation for all arms: that of a
randomized block design with seeds as blocks, which is right if all arms vary alike; the table of pass rates has the
deviation of each. p is of pass@{k} and corrected for the {tests} contrasts by Holm's method; intervals are not.
Detectable is the difference at pass@{k} that {power:.0%} of such studies would find after a correction by Bonferroni,
if seeds vary as they did here. Where deviations differ, p alone is the safer one: of the paired t test of the two arms,
not corrected.
"""
COSTS = """\
Answers: different ones among the {samples} samples of a problem, as the verifier reads them. Tokens: of a response.
Seconds: of a training step, the fastest tenth of all steps of the arm, since machines of studies are shared. At equal
seconds: the difference at pass@{k} if the first arm had trained for as long as the second one did. Its pass@{k} is
moved by the gain per step of its training samples over the second half of the steps (linear regression, all seeds)."""
TRAINING = """\
Means over steps and seeds. Tokens shaped: those whose advantage shaping changed. Change: how much it did,
relative to the advantage."""
EXPLORATORY = "Exploratory arms have too few seeds to decide anything."


@dataclass(frozen=True)
class Block:
    """What arms got with each of the seeds that all of them have: a randomized block design, whose blocks are seeds.

    An arm and a seed each shift a result by something of their own, and what remains has one variance for all.
    """

    values: Tensor
    """[S, A] float64, for at least two seeds and two arms."""

    @property
    def freedom(self) -> int:
        """Degrees of freedom of what remains."""
        seeds, arms = self.values.shape
        return (seeds - 1) * (arms - 1)

    @property
    def error(self) -> float:
        """The standard error of the difference between two arms' means."""
        values = self.values
        rest = values - values.mean(dim=0) - values.mean(dim=1, keepdim=True) + values.mean()
        error = math.sqrt(2 * float(rest.square().sum()) / self.freedom / len(values))
        return error if error > ROUNDING else 0.0

    def margin(self) -> float:
        """Half of the 95% interval of a difference."""
        return float(student.ppf(1 - LEVEL / 2, self.freedom)) * self.error

    def p(self, difference: float) -> float:
        """Of the two-sided test that there is no difference."""
        if self.error == 0:
            return float(abs(difference) <= ROUNDING)
        return 2 * float(student.sf(abs(difference) / self.error, self.freedom))

    def detectable(self, level: float = LEVEL) -> float:
        """The true difference that this test at ``level`` finds with probability 0.8, if ``error`` is the true one.

        From the noncentral t distribution.
        """
        critical = student.ppf(1 - level / 2, self.freedom)

        def lack(noncentrality: float) -> float:
            # The other tail adds less than 1e-6.
            return float(POWER - nct.sf(critical, self.freedom, noncentrality))

        # At three times the critical value, noise does not hide it.
        return self.error * float(brentq(lack, 0.0, 3 * critical))


def holm(ps: Sequence[float]) -> list[float]:
    """p values corrected for their number, so that any of them is below 0.05 by chance in 5% of studies (Holm 1979)."""
    order = sorted(range(len(ps)), key=ps.__getitem__)
    corrected, least = [0.0] * len(ps), 0.0
    for rank, place in enumerate(order):
        least = max(least, min(1.0, (len(ps) - rank) * ps[place]))
        corrected[place] = least
    return corrected


def rates(run: Mapping[str, Any], ks: Sequence[int]) -> Tensor:
    """pass@k of each problem of a run's results, [P, K] float64."""
    correct = torch.tensor(run["correct"])
    samples = torch.full_like(correct, run["samples"])
    return torch.stack([pass_at_k(samples, correct, k) for k in ks], dim=1)


@dataclass(frozen=True)
class Results:
    """The results of a study's runs."""

    study: Study
    rows: Sequence[Mapping[str, Any]]

    @classmethod
    def of_report(cls, facts: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> "Results":
        """Of the study that the facts of a report hold."""
        given = facts["study"]
        return cls(Study(**(given | {"arms": {name: Arm(**arm) for name, arm in given["arms"].items()}})), rows)

    @cached_property
    def by_arm(self) -> dict[str, dict[int, Mapping[str, Any]]]:
        """Arm -> seed -> results of its run, for arms that have a run, in the order of the study."""
        by_arm = {name: {row["seed"]: row for row in self.rows if row["arm"] == name} for name in self.study.arms}
        return {name: runs for name, runs in by_arm.items() if runs}

    @cached_property
    def rates(self) -> dict[str, dict[int, Tensor]]:
        """Arm -> seed -> pass@k of each problem, [P, K]."""
        return {
            name: {seed: rates(run, self.study.ks) for seed, run in runs.items()} for name, runs in self.by_arm.items()
        }

    @cached_property
    def problems(self) -> dict[int, Sequence[int]]:
        """Seed -> the numbers of its runs' problems, in the order of their rates. Seeds may have drawn different ones.

        Raises:
            SystemExit: not all arms had the same ones.
        """
        problems: dict[int, Sequence[int]] = {}
        for row in self.rows:
            if isinstance(row["problems"], int):
                raise SystemExit(f"error: {row['arm']}, seed {row['seed']}: an older record; remove it to run it again")
            if problems.setdefault(row["seed"], row["problems"]) != row["problems"]:
                raise SystemExit(f"error: {row['arm']}: with seed {row['seed']} it had other problems than other arms")
        return problems

    def estimates(self, arm: str) -> list[tuple[float, float, float]]:
        """pass@k of an arm, low and high: the mean over seeds and their problems, with an interval over problems."""
        problems = torch.tensor([problem for seed in self.rates[arm] for problem in self.problems[seed]])
        values = torch.cat(list(self.rates[arm].values()))
        different, places = problems.unique(return_inverse=True)
        # Of each problem the sums over the seeds that had it, and the number of these.
        sums = values.new_zeros(len(different), values.shape[1] + 1)
        sums.index_add_(0, places, torch.cat([values, values.new_ones(len(values), 1)], dim=1))
        means = sums[:, :-1].sum(dim=0) / sums[:, -1].sum()
        if len(different) == 1:  # whose spread is unknown
            return [(mean, math.nan, math.nan) for mean in means.tolist()]

        def ratios(drawn: Any, axis: int) -> Any:
            totals = drawn.sum(axis=axis)
            return totals[:-1] / totals[-1:]

        rng = np.random.default_rng(0)
        found = bootstrap((sums.numpy(),), ratios, n_resamples=DRAWS, method="percentile", vectorized=True, rng=rng)
        return list(zip(means.tolist(), *(end.tolist() for end in found.confidence_interval), strict=True))

    def mean(self, arm: str, key: str, seeds: Sequence[int]) -> Tensor:
        """Return answers of a problem or tokens of a response, the mean of an arm with these seeds, [seeds] float64."""
        runs = [self.by_arm[arm][seed] for seed in seeds]
        each = {"answers": 1, "tokens": runs[0]["samples"]}[key]
        return torch.tensor([run[key] for run in runs], dtype=torch.float64).mean(dim=1) / each

    @cached_property
    def has_costs(self) -> bool:
        """Whether all records have answers, tokens and seconds; those of earlier studies do not."""
        return all(row.get("answers") and row.get("tokens") and row.get("seconds") for row in self.rows)

    def seconds(self, arm: str) -> float:
        """Return the mean of the fastest tenth of an arm's steps."""
        steps = sorted(second for run in self.by_arm[arm].values() for second in run["seconds"])
        return statistics.fmean(steps[: math.ceil(len(steps) / 10)])

    def gain(self, arm: str) -> float:
        """Return what pass@1 of the samples gains in a step, by linear regression over the second half of the steps."""
        rewards = [run["reward"][len(run["reward"]) // 2 :] for run in self.by_arm[arm].values()]
        points = [point for run in rewards for point in enumerate(run)]
        return statistics.linear_regression(*zip(*points, strict=True)).slope

    def at_equal_seconds(self, pair: Sequence[str], difference: float) -> float:
        """Return the difference of two arms' pass@k if the first had trained for the second one's time."""
        steps = statistics.fmean(len(run["reward"]) for run in self.by_arm[pair[1]].values())
        reached = steps * self.seconds(pair[1]) / self.seconds(pair[0])
        return difference + self.gain(pair[0]) * (reached - steps)

    @cached_property
    def block_seeds(self) -> list[int]:
        """The seeds that all arms of decisive contrasts have been run with."""
        return self.shared(self.study.decisive_arms)

    def means(self, arm: str, seeds: Sequence[int]) -> Tensor:
        """pass@k of an arm with these seeds, [seeds, K]."""
        return torch.stack([self.rates[arm][seed].mean(dim=0) for seed in seeds])

    def shared(self, arms: Iterable[str]) -> list[int]:
        """The seeds that all of these arms have been run with."""
        seeds = [set(self.by_arm.get(arm, {})) for arm in arms]
        return sorted(set.intersection(*seeds)) if seeds else []


def page(facts: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """The results as Markdown."""
    results = Results.of_report(facts, rows)
    study = results.study
    missing = sum(len(arm.seeds) for arm in study.arms.values()) - len(rows)
    codes = list(dict.fromkeys(row["code"] for row in rows))
    parts = [f"# {study.question}", study.note, f"{facts['hardware']}, {facts['date']}. Code: {'; '.join(codes)}."]
    if missing:
        parts.append(f"**Incomplete: {missing} of {missing + len(rows)} runs are missing.**")
    if len(codes) > 1:
        parts.append("**The runs are of different code or packages, so they do not differ by their arms alone.**")
    parts += ["Regenerate with", f"    {facts['command']}", f"![pass@k of the arms]({facts['plot']})"]
    remarks, over = RATES, "seeds, for these problems"
    if len({tuple(problems) for problems in results.problems.values()}) > 1:
        remarks, over = f"{RATES}{DRAWN}\n", "seeds and the problems that they drew"
    if len(results.block_seeds) > 1:
        remarks += TESTS.format(over=over, k=study.ks[0], tests=len(study.decisive), power=POWER)
    if any(arm.exploratory for arm in study.arms.values()):
        remarks += EXPLORATORY
    parts += [remarks.strip(), "## Pass rates", _rates(results), "## Differences", _differences(results)]
    if results.has_costs:
        samples = "/".join(dict.fromkeys(str(row["samples"]) for row in rows))
        parts += ["## Answers, tokens and seconds", COSTS.format(samples=samples, k=study.ks[0]), _costs(results)]
        parts += [_cost_differences(results)]
    parts += ["## Training", TRAINING, _training(results), "## Arms", f"All: `{' '.join(study.train)}`", _arms(study)]
    return "\n\n".join(filter(None, parts)) + "\n"


def _rates(results: Results) -> str:
    rows = []
    for arm, runs in results.by_arm.items():
        cells = [f"{rate:.1%} ({low:.1%} to {high:.1%})" for rate, low, high in results.estimates(arm)]
        of_first = results.means(arm, list(runs))[:, 0].tolist()
        deviation = _points(statistics.stdev(of_first)) if len(of_first) > 1 else ""
        rows.append([_label(results.study, arm), str(len(runs)), cells[0], deviation, *cells[1:]])
    first, *others = [f"pass@{k}:" for k in results.study.ks]
    return table(["arm", "seeds:", first, "deviation over seeds:", *others], rows).strip()


def _differences(results: Results) -> str:
    study, rows = results.study, []
    decisive, arms, seeds = study.decisive, study.decisive_arms, results.block_seeds
    others = [pair for pair in study.contrasts if pair not in decisive]
    if len(seeds) > 1:
        values = torch.stack([results.means(arm, seeds) for arm in arms], dim=1)
        blocks = [Block(values[..., place]) for place in range(len(study.ks))]
        differences = [_difference(results, pair, seeds) for pair in decisive]
        corrected = holm([blocks[0].p(of_ks[0]) for of_ks in differences])
        power = _points(blocks[0].detectable(LEVEL / len(decisive)))
        for pair, of_ks, p in zip(decisive, differences, corrected, strict=True):
            cells = [_signed(value, block.margin()) for value, block in zip(of_ks, blocks, strict=True)]
            of_pair = values[:, [arms.index(arm) for arm in pair], 0]
            ps = [f"{p:.2g}", f"{Block(of_pair).p(of_ks[0]):.2g}"]
            rows.append([" - ".join(pair), str(len(seeds)), cells[0], power, *ps, *cells[1:]])
    else:
        others = study.contrasts
    for pair in others:
        both = results.shared(pair)
        if both:
            cells = [_signed(value) for value in _difference(results, pair, both)]
            name = f"{' - '.join(pair)}{'' if pair in decisive else ' (exploratory)'}"
            rows.append([name, str(len(both)), cells[0], "", "", "", *cells[1:]])
    first, *more = [f"pass@{k}:" for k in study.ks]
    return table(["contrast", "pairs:", first, "detectable:", "p:", "p alone:", *more], rows).strip()


def _costs(results: Results) -> str:
    rows = []
    for arm, runs in results.by_arm.items():
        answers, tokens = (float(results.mean(arm, key, list(runs)).mean()) for key in COUNTS)
        rows.append([_label(results.study, arm), f"{answers:.2f}", f"{tokens:.1f}", f"{results.seconds(arm):.2f}"])
    return table(["arm", "answers:", "tokens:", "seconds:"], rows).strip()


def _cost_differences(results: Results) -> str:
    rows = []
    for pair in results.study.contrasts:
        seeds = results.shared(pair)
        if seeds:
            cells = []
            for key in COUNTS:
                values = torch.stack([results.mean(arm, key, seeds) for arm in pair], dim=1)
                margin = f" ± {Block(values).margin():.2f}" if len(seeds) > 1 else ""
                cells.append(f"{float((values[:, 0] - values[:, 1]).mean()):+.2f}{margin}")
            seconds = results.seconds(pair[0]) / results.seconds(pair[1])
            same = results.at_equal_seconds(pair, _difference(results, pair, seeds)[0])
            rows.append([" - ".join(pair), *cells, f"{seconds:.3f}", _points(same, "+")])
    first = f"pass@{results.study.ks[0]} at equal seconds:"
    return table(["contrast", "answers:", "tokens:", "seconds, ratio:", first], rows).strip()


def _difference(results: Results, pair: Sequence[str], seeds: Sequence[int]) -> list[float]:
    """Of the means over seeds, for each k."""
    first, second = (results.means(arm, seeds).mean(dim=0) for arm in pair)
    return (first - second).tolist()


def _signed(difference: float, margin: float | None = None) -> str:
    if margin is None:
        return _points(difference, "+")
    low, high = difference - margin, difference + margin
    return f"{_points(difference, '+')} ({_points(low, '+')} to {_points(high, '+')})"


def _points(rate: float, sign: str = "") -> str:
    return f"{100 * rate:{sign}.1f}"


def _label(study: Study, arm: str) -> str:
    return f"{arm} (exploratory)" if study.arms[arm].exploratory else arm


def _training(results: Results) -> str:
    forms = {"reward": ".1%", "entropy": ".4f", "shaped_share": ".1%", "shaped_change": ".1%"}
    rows = []
    for arm, runs in results.by_arm.items():
        values = {key: [value for run in runs.values() for value in run[key]] for key in forms}
        cells = [f"{statistics.fmean(values[key]):{form}}" if values[key] else "" for key, form in forms.items()]
        rows.append([arm, *cells])
    columns = ["arm", "pass@1 of the samples:", "entropy of the policy, nats:", "tokens shaped:", "change:"]
    return table(columns, rows).strip()


def _arms(study: Study) -> str:
    rows = [
        [_label(study, name), f"`{' '.join(arm.overrides)}`", ", ".join(map(str, arm.seeds))]
        for name, arm in study.arms.items()
    ]
    return table(["arm", "overrides", "seeds"], rows).strip()


def draw(results: Results, file: Path) -> None:
    """pass@k of each arm, a panel for each k; below, the share of correct samples of each training step."""
    ks = results.study.ks
    with rc_context(fname=STYLE):
        rows = len(results.by_arm)
        figure = Figure(figsize=(3.2 * len(ks) + 2, 0.35 * rows + 4.6), layout="constrained")
        above, below = figure.subfigures(2, 1, squeeze=False, height_ratios=[0.35 * rows + 0.8, 3.8])[:, 0]
        panels = above.subplots(1, len(ks), sharey=True, squeeze=False)[0]
        for row, arm in enumerate(results.by_arm):
            _dots(panels, results, arm, row)
        for panel, k in zip(panels, ks, strict=True):
            panel.set_title(f"pass@{k}")
            panel.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        panels[0].set_yticks(range(rows), list(results.by_arm))
        panels[0].invert_yaxis()
        _curves(below.subplots(), results)
        FigureCanvasAgg(figure).print_figure(file, metadata={"Date": None})


def _dots(panels: Sequence[Axes], results: Results, arm: str, row: int) -> None:
    """A dot for each seed, the mean, and its interval over problems."""
    colour = COLOURS[row % len(COLOURS)]
    means = results.means(arm, list(results.by_arm[arm]))
    for place, (panel, (rate, low, high)) in enumerate(zip(panels, results.estimates(arm), strict=True)):
        panel.plot([low, high], [row, row], color=colour, linewidth=5, alpha=0.35)
        panel.plot([rate], [row], marker="|", markersize=12, color=colour)
        of_k = means[:, place].tolist()
        panel.plot(of_k, [row] * len(of_k), linestyle="", marker="o", markersize=3.5, color="#333333")


def _curves(panel: Axes, results: Results) -> None:
    for row, (arm, runs) in enumerate(results.by_arm.items()):
        by_step = [statistics.fmean(step) for step in zip(*(run["reward"] for run in runs.values()), strict=False)]
        dashed = "-" if row < len(COLOURS) else "--"
        colour = COLOURS[row % len(COLOURS)]
        panel.plot(range(1, len(by_step) + 1), by_step, dashed, color=colour, linewidth=1.3, label=arm)
    panel.set_title("correct samples in training, mean over seeds")
    panel.set_xlabel("step")
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    panel.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)
