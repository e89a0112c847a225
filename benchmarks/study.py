"""Train every arm of a study with every seed, and say what the figures show and what they could have shown.

python benchmarks/study.py benchmarks/studies/rank_shaping.yaml          # runs what is missing, then writes the results
python benchmarks/study.py benchmarks/studies/rank_shaping.yaml --report   # the results of what is there

A study is a YAML file:

    question: Does rank shaping raise pass@1 of the embedded task?
    ks: [1, 8, 32]                            # the first is the one that decides
    seeds: [0, 1, 2, 3, 4]
    train: [trainer.total_training_steps=30, rollout.val_kwargs.n=32]
    arms:
      grpo: {overrides: [experiment=grpo]}
      weight_3: {overrides: [experiment=verl_grpo, reward_manager.aux_reward_global_weight=3]}
      rank_alone: {overrides: [...], seeds: [0, 1], exploratory: true}
    contrasts:                                # the first less the second, seed by seed
      - [weight_3, grpo]
      - [rank_alone, grpo]
    prepare:                                  # optional: a folder, and how Python makes it, as {out}, if it is missing
      outputs/studies/hard: [scripts/prepare_data.py, arithmetic, --out, '{out}']

What is compared is the validation at the end of each training, all of whose samples count. Runs follow one another,
seed by seed, so that a study that is stopped has complete seeds first; exploratory arms come last. Each run is kept in
RUNS/ARM/seed_N, with its options in study.json once it has ended well, where studies find each other's, and its output
beside it; one that is complete is not run again, one that fails does not stop the others. A training whose study was
killed goes on to its end, but counts for nothing. Beside the study's file go NAME.md, the tables; NAME.jsonl, how they
were made and what each run got right; NAME.svg, pass@k and the training's rewards. A run that NAME.jsonl has, with the
same options, is not run again either: a study can go on elsewhere. For new code remove that file.

With trainer.n_gpus_per_node=1 and OMP_NUM_THREADS=1, the same command can run side by side as often as there are cores.

Its page needs matplotlib: `pip install -r requirements/analysis.txt`.
"""

import argparse
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import pandas as pd
from bench_report import ROOT, provenance, read_lines, read_report, write_report
from study_file import Study
from study_page import LOGGED, Results, draw, page

from verl.utils.files import replace_text

TRAIN = [sys.executable, "-m", "verl.trainer.main_ppo"]
"""What trains, before its overrides."""

SHUFFLED = "benchmarks/studies/shuffled.py:Shuffled"
RENAMED = {
    (f"{old}={SHUFFLED}", f"+{old}_kwargs.seed=${{seed}}"): "calculator.shuffle_within_groups=true"
    for old in ("algorithm.recompose", "trainer.method")
}
"""Consecutive overrides of earlier runs -> the override that does the same today."""

PATIENCE_S = 60
"""What a training that is told to end may take to end its engines."""


@dataclass(frozen=True, eq=False)
class Run:
    """One arm with one seed."""

    arm: str
    seed: int
    folder: Path
    options: list[str]
    """Overrides of the training."""

    @property
    def made(self) -> list[str] | None:
        """The options of the run that is complete in its folder; None if none is."""
        return current(json.loads(self._record.read_text())) if self._record.exists() else None

    @property
    def complete(self) -> bool:
        """Whether the training has ended well."""
        return self.made == self.options

    def train(self, waits: bool = True) -> bool | None:
        """Train from the start, unless another study has completed this run.

        Returns:
            Whether it is complete; if not, a line has said why. None: another study trains this arm, and this one does
            not wait.
        """
        arm = self.folder.parent
        arm.mkdir(parents=True, exist_ok=True)
        with (arm / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
            except BlockingIOError:
                return None
            if self.made is None:
                print(f"{self.arm}, seed {self.seed}", flush=True)
                self._train(lock)
            elif not self.complete:
                self._tell(f"{self.folder} was made with {self.made}, not {self.options}; remove it, or name --runs")
        return self.complete

    def _train(self, lock: IO[str]) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        log = self.folder.with_suffix(".log")
        command = [*TRAIN, *self.options, f"trainer.default_local_dir={self.folder}"]
        with log.open("w") as output:
            # It keeps the lock, so that a study that is killed leaves no training beside the next one's.
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=output, stderr=output, pass_fds=[lock.fileno()], start_new_session=True
            )
            try:
                code = process.wait()
            finally:
                end(process)
        for checkpoint in self.folder.glob("global_step_*"):
            shutil.rmtree(checkpoint)
        if code:
            self._tell(f"ended with exit code {code}; see {log}")
        else:
            replace_text(self._record, json.dumps(self.options) + "\n")

    def _tell(self, why: str) -> None:
        print(f"error: {self.arm} with seed={self.seed}: {why}", file=sys.stderr, flush=True)

    def results(self) -> dict[str, Any]:
        """Return what each problem's samples were, the log, and the code and packages."""
        *_, last = sorted(self.folder.glob("samples/val_*.parquet"))
        of_problems = pd.read_parquet(last, columns=["uid", "correct", "answer", "num_tokens"]).groupby("uid")
        (samples,) = of_problems["correct"].count().unique().tolist()
        lines = read_lines(self.folder / "metrics.jsonl")
        # A figure that was not finite is null.
        logged = {name: [line[key] for line in lines if line.get(key) is not None] for name, key in LOGGED.items()}
        summary = json.loads((self.folder / "summary.json").read_text())
        packages = [f"{name} {version}" for name, version in summary["versions"].items()]
        code = ", ".join([str(summary["git_revision"]), *packages])
        problems = of_problems.agg(
            correct=("correct", "sum"), answers=("answer", "nunique"), tokens=("num_tokens", "sum")
        )
        columns = {name: problems[name].tolist() for name in problems}
        results = {"samples": samples, **columns, "problems": problems.index.tolist(), "code": code}
        return {"arm": self.arm, "seed": self.seed, **results, **logged}

    @property
    def _record(self) -> Path:
        return self.folder / "study.json"


def end(process: subprocess.Popen[bytes]) -> None:
    """End a training that still runs, and whatever it has left of its group."""
    try:
        if process.poll() is None:
            process.terminate()
            process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        pass
    finally:  # also where a second signal ends the wait
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def runs_of(study: Study, folder: Path) -> list[Run]:
    """All runs, seed by seed, those of exploratory arms last."""
    pairs = [(arm.exploratory, seed, name) for name, arm in study.arms.items() for seed in arm.seeds]
    return [
        Run(name, seed, folder / name / f"seed_{seed}", [*study.train, *study.arms[name].overrides, f"seed={seed}"])
        for _, seed, name in sorted(pairs, key=lambda pair: pair[:2])
    ]


def current(overrides: Sequence[str]) -> list[str]:
    """Return the overrides with which a run of that time would be made today."""
    lines = "\n".join(overrides)
    for before, now in RENAMED.items():
        lines = lines.replace("\n".join(before), now)
    return lines.splitlines()


def prepare(folder: Path, arguments: Sequence[str]) -> None:
    """Make a folder that is missing; it is there in whole or not at all."""
    if not folder.exists():
        part = folder.with_name(f"{folder.name}.{os.getpid()}")
        command = [sys.executable, *(argument.format(out=part) for argument in arguments)]
        try:
            subprocess.run(command, cwd=ROOT, check=True)
            part.rename(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)


def recorded(study: Study, out: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """Return arm and seed -> the row of a run in the records, made with the options that the study gives that arm.

    The records are ``out``.jsonl and the study's ``records``; the former's rows count before the latter's.
    """
    found: dict[tuple[str, int], dict[str, Any]] = {}
    own = out.with_name(f"{out.name}.jsonl")
    for data in [*(out.parent / name for name in study.records), *([own] if own.exists() else [])]:
        try:
            facts, rows = read_report(data)
        except (OSError, ValueError) as error:
            raise SystemExit(f"error: records: {data}: {error}") from None
        before = facts["study"]["arms"] if facts["study"]["train"] == study.train else {}
        same = {n for n, arm in study.arms.items() if n in before and current(before[n]["overrides"]) == arm.overrides}
        found |= {(row["arm"], row["seed"]): row for row in rows if row["arm"] in same}
    return found


def report(study: Study, runs: Sequence[Run], out: Path, argv: Sequence[str]) -> None:
    """Write the results of the runs that are complete, here or in the report so far."""
    known = recorded(study, out)
    found = (run.results() if run.complete else known.get((run.arm, run.seed)) for run in runs)
    rows = [row for row in found if row is not None]
    if not rows:
        raise SystemExit("error: no run of this study has finished yet")
    facts = provenance("study.py", argv) | {"study": asdict(study), "plot": f"{out.name}.svg"}
    write_report(out, facts, rows, page)
    draw(Results.of_report(*read_report(out.with_name(f"{out.name}.jsonl"))), out.with_name(f"{out.name}.svg"))
    print(out.with_name(f"{out.name}.md").read_text())


def main(argv: list[str]) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path)
    parser.add_argument("--runs", type=Path, default=ROOT / "outputs/studies", help="default: outputs/studies")
    parser.add_argument("--report", action="store_true", help="run nothing")
    options = parser.parse_args(argv)
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, lambda number, _: sys.exit(128 + number))
    study = Study.read(options.study)
    runs = runs_of(study, options.runs.resolve())
    out = options.study.with_suffix("")
    known = recorded(study, out)
    missing = [run for run in runs if not run.complete and (run.arm, run.seed) not in known]
    outcomes: dict[Run, bool | None] = {}
    if missing and not options.report:
        print(f"{len(missing)} of {len(runs)} runs are missing", flush=True)
        for folder, arguments in study.prepare.items():
            prepare(ROOT / folder, arguments)
        # First those of arms that no other study is training, then the others.
        for waits in (False, True):
            outcomes |= {run: run.train(waits) for run in missing if outcomes.get(run) is None}
    failed = sum(outcome is False for outcome in outcomes.values())
    report(study, runs, out, [str(options.study)])
    if failed:
        raise SystemExit(f"error: {failed} of {len(missing)} runs failed; the same command tries them again")


if __name__ == "__main__":
    main(sys.argv[1:])
