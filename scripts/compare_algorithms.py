"""Train the embedded task by every algorithm, several seeds each, and print what they learned.

python scripts/compare_algorithms.py --runs outputs/compare --out benchmarks/learning

Every run is the main job in its own process, on the CPU, with the shipped configuration except for the number of steps.
Runs that have finished below --runs are not repeated, so the same command resumes an interrupted comparison.
Writes OUT.jsonl (how it was made, then each run's results) and OUT.md.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench_report import provenance, write_report
from rich.console import Console
from rich.table import Table

ALGORITHMS = {
    "GRPO": ["experiment=grpo"],
    "VERL-GRPO": ["experiment=verl_grpo"],
    "PPO": ["experiment=ppo", "rollout.n=8"],  # as many responses as the others
    "VERL-PPO": ["experiment=verl_ppo", "rollout.n=8"],
    "RLOO": ["experiment=grpo", "algorithm=rloo"],
    "DAPO": ["experiment=dapo"],
    "released code": ["experiment=released_code"],
}
"""Name -> Hydra overrides."""

DEFAULT = [name for name in ALGORITHMS if name != "released code"]

VALIDATION = ["rollout.val_kwargs.n=2", "rollout.val_kwargs.temperature=1.0"]
"""Compare what training improves: sampled responses, two to each problem."""

COLUMNS = ["algorithm", "pass@1 before", "after, mean", "after, by seed", "gain", "tokens shaped", "by"]


def train(overrides: list[str], steps: int, seed: int, folder: Path) -> None:
    """One run of the main job into ``folder``, unless it holds a finished one."""
    if (folder / "summary.json").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *overrides, f"seed={seed}", "device=cpu"]
    command += [
        *VALIDATION,
        f"trainer.total_training_steps={steps}",
        "trainer.test_freq=0",
        f"trainer.default_local_dir={folder}",
    ]
    log = folder.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT).returncode
    if code:
        raise SystemExit(f"{' '.join(command)}\nfailed with exit code {code}; its output is in {log}")


def measured(folder: Path) -> dict[str, float]:
    """The results of a finished run."""
    summary = json.loads((folder / "summary.json").read_text())
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    training = [record for record in records if "actor/lr" in record]
    return {
        "before": summary["before"]["val/pass@1"],
        "after": summary["after"]["val/pass@1"],
        "shaped_share": statistics.fmean(r.get("reward_manager/shaped_token_share", 0.0) for r in training),
        "shaped_by": statistics.fmean(r.get("reward_manager/shaped_relative_change", 0.0) for r in training),
    }


def table_rows(runs: list[dict[str, Any]]) -> list[list[str]]:
    """One row of ``COLUMNS`` for each algorithm."""
    rows = []
    for name in dict.fromkeys(run["algorithm"] for run in runs):
        of_name = [run for run in runs if run["algorithm"] == name]
        before, after, share, by = (
            statistics.fmean(run[key] for run in of_name) for key in ("before", "after", "shaped_share", "shaped_by")
        )
        each = " ".join(f"{run['after']:.1%}" for run in of_name)
        gain = f"{100 * (after - before):+.1f}"
        rows.append([name, f"{before:.1%}", f"{after:.1%}", each, gain, f"{share:.1%}", f"{by:.2%}"])
    return rows


def scatter(runs: list[dict[str, Any]]) -> float:
    """The largest difference between two seeds of one algorithm."""
    after: dict[str, list[float]] = {}
    for run in runs:
        after.setdefault(run["algorithm"], []).append(run["after"])
    return max(max(values) - min(values) for values in after.values())


def page(facts: dict[str, Any], runs: list[dict[str, Any]]) -> str:
    """The table as Markdown, with how it was made and how far apart the seeds of one algorithm are."""
    lines = [
        "# What the algorithms learn on the embedded task",
        "",
        f"{facts['steps']} steps of 48 prompts, seeds {', '.join(map(str, facts['seeds']))}; {facts['hardware']}, "
        f"{facts['date']}. Made by `{facts['command']}`.",
        "",
        "pass@1 is the share of held-out problems that a response sampled at temperature 1 solves; the gain is in "
        "percentage points. Tokens shaped: the share of response tokens whose advantage rank shaping changed, and by "
        "how much of the advantage; means over the steps. The seeds of one algorithm end up to "
        f"{100 * scatter(runs):.0f} points apart: smaller differences between algorithms mean nothing.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{'---|' * len(COLUMNS)}",
        *(f"| {' | '.join(cells)} |" for cells in table_rows(runs)),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--out", type=Path, required=True, help="path of the results without suffix")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--algorithms", nargs="+", choices=list(ALGORITHMS), default=DEFAULT)
    args = parser.parse_args()
    console = Console()
    runs: list[dict[str, Any]] = []
    # Seed by seed, so that an interrupted comparison has every algorithm.
    for seed in args.seeds:
        for name in args.algorithms:
            folder = args.runs / f"{name.replace(' ', '_')}-{args.steps}-{seed}"
            train(ALGORITHMS[name], args.steps, seed, folder.resolve())
            run = {"algorithm": name, "seed": seed} | measured(folder)
            runs.append(run)
            console.print(f"{name}, seed {seed}: pass@1 {run['before']:.1%} -> {run['after']:.1%}", highlight=False)
    runs.sort(key=lambda run: args.algorithms.index(run["algorithm"]))
    table = Table(*COLUMNS, title=f"{args.steps} steps, seeds {args.seeds}")
    for cells in table_rows(runs):
        table.add_row(*cells)
    console.print(table)
    facts = provenance("compare_algorithms.py", sys.argv[1:]) | {"steps": args.steps, "seeds": args.seeds}
    write_report(args.out, facts, runs, page)


if __name__ == "__main__":
    main()
