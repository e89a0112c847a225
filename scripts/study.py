"""Train every arm of a study with every seed, and say what the figures show and what they could have shown.

python scripts/study.py benchmarks/studies/rank_shaping.yaml            # runs what is missing, then writes the results
python scripts/study.py benchmarks/studies/rank_shaping.yaml --report   # the results of what is there

A study is a YAML file:

    question: Does rank shaping raise pass@k of the embedded task?
    baseline: grpo                            # the others are compared with it, seed by seed
    seeds: [0, 1, 2, 3, 4]
    ks: [1, 8, 32]
    train: [trainer.total_training_steps=30, rollout.val_kwargs.n=32]
    arms:
      grpo: {overrides: [experiment=grpo]}
      weight_3: {overrides: [experiment=verl_grpo, reward_manager.aux_reward_global_weight=3]}
      rank_alone: {overrides: [...], seeds: [0, 1], exploratory: true}
    prepare:                                  # optional: a folder, and the command that makes it if it is missing
      outputs/studies/hard: [scripts/prepare_data.py, arithmetic, --out, outputs/studies/hard]

What is compared is the validation at the end of each training, all of whose samples count. Runs follow one another,
seed by seed, so that a study that is stopped has complete seeds first; exploratory arms come last. Each run is kept in
RUNS/ARM/seed_N, its output and options beside it, where studies find each other's; one that is complete is not run
again, one that fails does not stop the others. Beside the study's file go NAME.md, the tables; NAME.jsonl, how they
were made and what each run got right; NAME.svg, pass@k and the way there.

Intervals over seeds need scipy: `pip install -r requirements/analysis.txt`.
"""

import argparse
import fcntl
import json
import math
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import yaml
from bench_report import provenance, read_report, write_report
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from scipy.stats import t as student
from torch import Tensor

from verl.evaluation.report.plots import STYLE
from verl.evaluation.statistics.bootstrap import mean_estimates
from verl.report.colours import COLOURS
from verl.rewards.pass_at_k import pass_at_k

ROOT = Path(__file__).resolve().parents[1]

POWER = 0.8
"""How often a study would find the smallest difference that it could have seen."""

LOGGED = {
    "reward": "train/pass@1",
    "shaped_share": "reward_manager/shaped_token_share",
    "shaped_change": "reward_manager/shaped_relative_change",
    "entropy": "actor/entropy",
}
"""What is kept of a run's log -> its name there."""


@dataclass(frozen=True)
class Arm:
    """A method under study."""

    overrides: list[str]
    seeds: list[int]
    baseline: str
    exploratory: bool = False
    """Named before, but tried with too few seeds to decide anything."""


@dataclass(frozen=True)
class Study:
    """A study's file."""

    question: str
    ks: list[int]
    train: list[str]
    arms: dict[str, Arm]
    prepare: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> "Study":
        """Raises ``SystemExit`` with one line for a file that is no study."""
        try:
            given = yaml.safe_load(path.read_text())
            shared = {"seeds": given.pop("seeds"), "baseline": given.pop("baseline")}
            arms = {name: Arm(**(shared | options)) for name, options in given.pop("arms").items()}
            study = cls(**given, arms=arms)
        except (OSError, yaml.YAMLError, TypeError, KeyError, AttributeError) as error:
            raise SystemExit(f"error: {path}: {type(error).__name__}: {error}") from None
        for name, arm in arms.items():
            if arm.baseline not in arms:
                raise SystemExit(f"error: {path}: {name}: baseline={arm.baseline!r}: must be one of {', '.join(arms)}")
        return study


@dataclass(frozen=True)
class Run:
    """One arm with one seed."""

    arm: str
    seed: int
    folder: Path
    options: list[str]
    """Overrides of the training."""

    @property
    def complete(self) -> bool:
        """Whether the training has ended.

        Raises:
            SystemExit: it was made with other options.
        """
        if not (self.folder / "summary.json").exists():
            return False
        made = json.loads(self._made.read_text()) if self._made.exists() else None
        if made != self.options:
            raise SystemExit(
                f"error: {self.folder} was made with {made}, not {self.options}; remove it, or name --runs"
            )
        return True

    def train(self) -> bool:
        """Train from the start; wait while another study trains this arm, and leave what that has completed.

        Returns:
            Whether it is complete; if not, a line says where the output of the command is.
        """
        arm = self.folder.parent
        arm.mkdir(parents=True, exist_ok=True)
        with (arm / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return self.complete or self._train()

    def _train(self) -> bool:
        shutil.rmtree(self.folder, ignore_errors=True)
        self._made.write_text(json.dumps(self.options) + "\n")
        log = self.folder.with_suffix(".log")
        command = [sys.executable, "-m", "verl.trainer.main_ppo", *self.options]
        with log.open("w") as output:
            command += [f"trainer.default_local_dir={self.folder}"]
            code = subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT).returncode
        if code:
            what = f"{self.arm} with seed={self.seed}"
            print(f"error: {what} ended with exit code {code}; see {log}", file=sys.stderr, flush=True)
        for checkpoint in self.folder.glob("global_step_*"):
            shutil.rmtree(checkpoint)
        return self.complete

    def results(self) -> dict[str, Any]:
        """What it got right: the number of correct samples of each problem, and its log."""
        *_, last = sorted(self.folder.glob("samples/val_*.parquet"))
        correct = pd.read_parquet(last, columns=["uid", "correct"]).groupby("uid")["correct"]
        (samples,) = correct.count().unique().tolist()
        lines = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        logged = {name: [line[key] for line in lines if key in line] for name, key in LOGGED.items()}
        return {"arm": self.arm, "seed": self.seed, "samples": samples, "correct": correct.sum().tolist(), **logged}

    @property
    def _made(self) -> Path:
        return self.folder.with_suffix(".json")


def runs_of(study: Study, folder: Path) -> list[Run]:
    """All runs, seed by seed, those of exploratory arms last."""
    pairs = [(arm.exploratory, seed, name) for name, arm in study.arms.items() for seed in arm.seeds]
    return [
        Run(name, seed, folder / name / f"seed_{seed}", [*study.train, *study.arms[name].overrides, f"seed={seed}"])
        for _, seed, name in sorted(pairs, key=lambda pair: pair[:2])
    ]


@dataclass(frozen=True)
class Comparison:
    """An arm less its baseline, over the seeds that both have."""

    difference: float
    low: float
    high: float
    """The 95% t interval over seeds; infinite for one seed."""
    detectable: float
    """The smallest true difference that this study would have found significant in four of five repetitions."""


def compared(arm: Mapping[int, float], baseline: Mapping[int, float]) -> Comparison:
    """Differences paired by seed: a seed fixes the order of prompts, which both arms share.

    Student's t with n - 1 degrees of freedom; the detectable difference is (t_{0.975} + t_{0.8}) times the standard
    error, the usual approximation to the power of the paired t test.

    Raises:
        ValueError: they share no seed.
    """
    shared = sorted(arm.keys() & baseline.keys())
    if not shared:
        raise ValueError("the arm and the baseline share no seed")
    differences = [arm[seed] - baseline[seed] for seed in shared]
    mean, n = statistics.fmean(differences), len(differences)
    if n == 1:
        return Comparison(mean, -math.inf, math.inf, math.inf)
    error = statistics.stdev(differences) / math.sqrt(n)
    margin = student.ppf(0.975, n - 1) * error
    return Comparison(mean, mean - margin, mean + margin, margin + student.ppf(POWER, n - 1) * error)


def rates(run: Mapping[str, Any], ks: Sequence[int]) -> Tensor:
    """pass@k of each problem of a run's results, [P, K] float64."""
    correct = torch.tensor(run["correct"])
    samples = torch.full_like(correct, run["samples"])
    return torch.stack([pass_at_k(samples, correct, k) for k in ks], dim=1)


Found = dict[str, dict[int, Mapping[str, Any]]]
"""Arm -> seed -> results of the run."""


def by_arm(study: Study, rows: Sequence[Mapping[str, Any]]) -> Found:
    """The results of the arms that have some, in the order of the study."""
    found = {name: {row["seed"]: row for row in rows if row["arm"] == name} for name in study.arms}
    return {name: runs for name, runs in found.items() if runs}


def page(facts: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """The results as Markdown."""
    study = _study(facts)
    found = by_arm(study, rows)
    missing = sum(len(arm.seeds) for arm in study.arms.values()) - len(rows)
    lines = [f"# {study.question}", ""]
    lines += [f"{facts['hardware']}, torch {facts['torch']}, vLLM {facts['vllm']}, {facts['date']}.", ""]
    if missing:
        lines += [f"**Incomplete: {missing} runs are not there yet.**", ""]
    lines += ["Regenerate with", "", f"    {facts['command']}", "", f"![pass@k and the way there]({facts['plot']})", ""]
    lines += [
        "Pass rates are means over seeds, with a 95% bootstrap interval over problems. Differences from the baseline",
        "are paired by seed, with a 95% t interval over seeds. A study of this size would find a true difference as",
        f"large as the one in the last column significant {POWER:.0%} of the time. Exploratory arms have too few seeds",
        "to decide anything.",
        "",
    ]
    for place, k in enumerate(study.ks):
        lines += [f"## pass@{k}", "", *_table(study, found, place), ""]
    return "\n".join([*lines, "## Training", "", *_training(found), "", "## Arms", "", *_arms(study), ""])


def _study(facts: Mapping[str, Any]) -> Study:
    given = facts["study"]
    return Study(**(given | {"arms": {name: Arm(**arm) for name, arm in given["arms"].items()}}))


def _table(study: Study, found: Found, place: int) -> Iterator[str]:
    yield "| arm | seeds | pass rate | over problems | difference | over seeds | detectable |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    for name, runs in found.items():
        passed = {seed: rates(run, study.ks)[:, place] for seed, run in runs.items()}
        (estimate,) = mean_estimates(torch.stack(list(passed.values())).mean(dim=0)[:, None])
        cells = [_label(study, name), str(len(runs)), f"{estimate.value:.1%}"]
        cells += [f"{estimate.low:.1%} to {estimate.high:.1%}"]
        baseline = study.arms[name].baseline
        base = {seed: rates(run, study.ks)[:, place] for seed, run in found.get(baseline, {}).items()}
        if name == baseline or not passed.keys() & base.keys():
            cells += ["", "", ""]
        else:
            pair = compared(_means(passed), _means(base))
            cells += [f"{pair.difference:+.1%}", *_interval(pair)]
        yield f"| {' | '.join(cells)} |"


def _interval(pair: Comparison) -> list[str]:
    if math.isinf(pair.detectable):
        return ["one seed", ""]
    return [f"{pair.low:+.1%} to {pair.high:+.1%}", f"{pair.detectable:.1%}"]


def _means(passed: Mapping[int, Tensor]) -> dict[int, float]:
    return {seed: float(of_problems.mean()) for seed, of_problems in passed.items()}


def _label(study: Study, name: str) -> str:
    return f"{name} (exploratory)" if study.arms[name].exploratory else name


def _training(found: Found) -> Iterator[str]:
    yield "Means over steps and seeds. Tokens shaped: those whose advantage shaping changed, and by how much of it."
    yield ""
    yield "| arm | pass@1 of the samples | entropy of the policy, nats | tokens shaped | by |"
    yield "|---|---:|---:|---:|---:|"
    for name, runs in found.items():
        means = {key: [value for run in runs.values() for value in run[key]] for key in LOGGED}
        cells = [_mean(means[key], form) for key, form in zip(LOGGED, (".1%", ".1%", ".1%", ".4f"), strict=True)]
        reward, share, change, entropy = cells
        yield f"| {name} | {reward} | {entropy} | {share} | {change} |"


def _mean(values: Sequence[float], form: str) -> str:
    return f"{statistics.fmean(values):{form}}" if values else ""


def _arms(study: Study) -> Iterator[str]:
    yield f"All: `{' '.join(study.train)}`"
    yield ""
    yield "| arm | overrides | seeds | baseline |"
    yield "|---|---|---|---|"
    for name, arm in study.arms.items():
        seeds = ", ".join(str(seed) for seed in arm.seeds)
        baseline = "" if name == arm.baseline else arm.baseline
        yield f"| {_label(study, name)} | `{' '.join(arm.overrides)}` | {seeds} | {baseline} |"


def draw(study: Study, found: Found, file: Path) -> None:
    """pass@k of each arm, a panel for each k; below, the share of correct samples of each training step."""
    with rc_context(STYLE):
        rows = len(found)
        figure = Figure(figsize=(3.2 * len(study.ks) + 2, 0.35 * rows + 4.6), layout="constrained")
        above, below = figure.subfigures(2, 1, squeeze=False, height_ratios=[0.35 * rows + 0.8, 3.8])[:, 0]
        panels = above.subplots(1, len(study.ks), sharey=True, squeeze=False)[0]
        for place, panel in enumerate(panels):
            _dots(panel, study, found, place)
        panels[0].set_yticks(range(rows), list(found))
        panels[0].invert_yaxis()
        _curves(below.subplots(), found)
        FigureCanvasAgg(figure).print_figure(file, metadata={"Date": None})


def _dots(panel: Axes, study: Study, found: Found, place: int) -> None:
    """A dot for each seed, the mean, and its interval over problems."""
    for row, runs in enumerate(found.values()):
        passed = [rates(run, study.ks)[:, place] for run in runs.values()]
        (estimate,) = mean_estimates(torch.stack(passed).mean(dim=0)[:, None])
        colour = COLOURS[row % len(COLOURS)]
        panel.plot([estimate.low, estimate.high], [row, row], color=colour, linewidth=5, alpha=0.35)
        panel.plot([estimate.value], [row], marker="|", markersize=12, color=colour)
        seeds = [float(of_problems.mean()) for of_problems in passed]
        panel.plot(seeds, [row] * len(seeds), linestyle="", marker="o", markersize=3.5, color="#333333")
    panel.set_title(f"pass@{study.ks[place]}")
    panel.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


def _curves(panel: Axes, found: Found) -> None:
    for row, (name, runs) in enumerate(found.items()):
        by_step = [statistics.fmean(step) for step in zip(*(run["reward"] for run in runs.values()), strict=False)]
        dashed = "-" if row < len(COLOURS) else "--"
        colour = COLOURS[row % len(COLOURS)]
        panel.plot(range(1, len(by_step) + 1), by_step, dashed, color=colour, linewidth=1.3, label=name)
    panel.set_title("correct samples in training, mean over seeds")
    panel.set_xlabel("step")
    panel.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    panel.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)


def report(study: Study, runs: Sequence[Run], out: Path, argv: Sequence[str]) -> None:
    """Write the results of the runs that are complete."""
    rows = [run.results() for run in runs if run.complete]
    if not rows:
        raise SystemExit("error: no run of the study is complete")
    facts = provenance("study.py", argv) | {"study": asdict(study), "plot": f"{out.name}.svg"}
    write_report(out, facts, rows, "")
    # From what was written, whose floats have fewer digits.
    facts, rows = read_report(out.with_name(f"{out.name}.jsonl"))
    write_report(out, facts, rows, page(facts, rows))
    draw(study, by_arm(study, rows), out.with_name(f"{out.name}.svg"))
    print(out.with_name(f"{out.name}.md").read_text())


def main(argv: list[str]) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path)
    parser.add_argument("--runs", type=Path, default=ROOT / "outputs/studies", help="default: outputs/studies")
    parser.add_argument("--report", action="store_true", help="run nothing")
    options = parser.parse_args(argv)
    study = Study.read(options.study)
    runs = runs_of(study, options.runs)
    missing = [] if options.report else [run for run in runs if not run.complete]
    for folder, command in study.prepare.items():
        if missing and not (ROOT / folder).exists():
            subprocess.run([sys.executable, *command], cwd=ROOT, check=True)
    failed = 0
    for number, run in enumerate(missing, start=1):
        print(f"run {number} of {len(missing)}: {run.arm}, seed {run.seed}", flush=True)
        failed += not run.train()
    report(study, runs, options.study.with_suffix(""), [argument for argument in argv if argument != "--report"])
    if failed:
        raise SystemExit(f"error: {failed} of {len(missing)} runs failed; the same command tries them again")


if __name__ == "__main__":
    main(sys.argv[1:])
