"""Train the embedded task by every algorithm, several seeds each, and print what they learned.

python scripts/compare_algorithms.py --runs outputs/compare --out benchmarks/learning

Every run is the main job in a process of its own, on the CPU, with the shipped configuration but for the number of
steps. A run that has finished below --runs is not repeated, so an interrupted comparison goes on where it stopped.
Writes OUT.md and OUT.json.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ALGORITHMS = {
    "GRPO": ["experiment=grpo"],
    "VERL-GRPO": ["experiment=verl_grpo"],
    "PPO": ["experiment=ppo"],
    "VERL-PPO": ["experiment=verl_ppo"],
    "RLOO": ["experiment=grpo", "algorithm=rloo"],
    "DAPO": ["experiment=dapo"],
    "released code": ["experiment=released_code"],
}
"""Name -> Hydra overrides."""

DEFAULT = [name for name in ALGORITHMS if name != "released code"]

VALIDATION = ["rollout.val_kwargs.n=2", "rollout.val_kwargs.temperature=1.0"]
"""What is compared is what training improves: responses as they are sampled, two to each problem."""

COLUMNS = ["algorithm", "pass@1 before", "after, mean", "after, by seed", "gain", "tokens shaped", "by"]


def train(overrides: list[str], steps: int, seed: int, folder: Path) -> None:
    """One run of the main job into ``folder``, unless a finished one is there."""
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
        raise SystemExit(f"{' '.join(command)}\nended with {code}; its output is in {log}")


def measured(folder: Path) -> dict[str, float]:
    """What a finished run says of itself."""
    summary = json.loads((folder / "summary.json").read_text())
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    training = [record for record in records if "actor/lr" in record]
    return {
        "before": summary["before"]["val/pass@1"],
        "after": summary["after"]["val/pass@1"],
        "shaped_share": statistics.fmean(r.get("reward_manager/shaped_token_share", 0.0) for r in training),
        "shaped_by": statistics.fmean(r.get("reward_manager/shaped_relative_change", 0.0) for r in training),
    }


def row(name: str, runs: list[dict[str, float]]) -> list[str]:
    """One algorithm's cells of ``COLUMNS``."""

    def mean(key: str) -> float:
        return statistics.fmean(run[key] for run in runs)

    return [
        name,
        f"{mean('before'):.1%}",
        f"{mean('after'):.1%}",
        " ".join(f"{run['after']:.1%}" for run in runs),
        f"{100 * (mean('after') - mean('before')):+.1f}",
        f"{mean('shaped_share'):.1%}",
        f"{mean('shaped_by'):.2%}",
    ]


def page(rows: list[list[str]], scatter: float, steps: int, seeds: list[int]) -> str:
    """The table as Markdown, with what it was measured on and how far the seeds of one algorithm are apart."""
    date = datetime.now(UTC).date().isoformat()
    lines = [
        "# What the algorithms learn on the embedded task",
        "",
        f"{steps} steps of 48 prompts, seeds {', '.join(map(str, seeds))}; {os.cpu_count()} CPU cores "
        f"({platform.machine()}), {date}. Made by `python scripts/compare_algorithms.py --seeds "
        f"{' '.join(map(str, seeds))}`.",
        "",
        "pass@1 is the share of held-out problems that a response sampled at temperature 1 solves; the gain is in "
        "percentage points. Tokens shaped: the share of response tokens whose advantage rank shaping changed, and by "
        f"how much of the advantage; means over the steps. The seeds of one algorithm end up to {100 * scatter:.0f} "
        "points apart: smaller differences between algorithms say nothing.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{'---|' * len(COLUMNS)}",
        *(f"| {' | '.join(cells)} |" for cells in rows),
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
    results: dict[str, list[dict[str, float]]] = {name: [] for name in args.algorithms}
    # Seed by seed, so that an interrupted comparison has every algorithm.
    for seed in args.seeds:
        for name in args.algorithms:
            folder = args.runs / f"{name.replace(' ', '_')}-{args.steps}-{seed}"
            train(ALGORITHMS[name], args.steps, seed, folder.resolve())
            run = measured(folder)
            results[name].append(run)
            console.print(f"{name}, seed {seed}: pass@1 {run['before']:.1%} -> {run['after']:.1%}", highlight=False)
    rows = [row(name, runs) for name, runs in results.items()]
    table = Table(*COLUMNS, title=f"{args.steps} steps, seeds {args.seeds}")
    for cells in rows:
        table.add_row(*cells)
    console.print(table)
    scatter = max(max(run["after"] for run in runs) - min(run["after"] for run in runs) for runs in results.values())
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.with_suffix(".md").write_text(page(rows, scatter, args.steps, args.seeds))
    record: dict[str, Any] = {"steps": args.steps, "seeds": args.seeds, "runs": results}
    args.out.with_suffix(".json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
