"""Kill training again and again, resume it each time, and compare with a run that was left alone.

python benchmarks/kill_test.py --out benchmarks/kill_test.md

A small random model learns arithmetic on CPU workers. At random moments the driver or a worker gets SIGKILL, every
third time while a checkpoint is being written; the same command then resumes the run. Prints a table. Exits with 1 if
the metrics of the two runs differ in a bit, timing aside, if a run fails without a kill, or if it ends before the last.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

from bench_report import hardware, today
from make_tiny_model import make_random_model
from rich.console import Console
from rich.table import Table

from verl.checkpoint.folders import checkpoints
from verl.data.arithmetic import ArithmeticTask
from verl.data.records import RL_SCHEMA, rl_record, write_parquet
from verl.run.tracking import TIMING_PREFIXES

ROOT = Path(__file__).resolve().parents[1]
MARKER = "VERL_KILL_TEST"
"""Environment variable that every process of a run inherits and by which its workers are found."""
COLUMNS = ["kill", "victim", "moment", "steps recorded", "resumes from step", "workers gone after"]
PATIENCE_S = 900.0


class Run:
    """One process of the main job and those that it starts."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self.folder = folder
        self.identity = uuid.uuid4().hex
        self.log = folder.with_suffix(".log")
        with self.log.open("a") as output:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=os.environ | {MARKER: self.identity},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def processes(self) -> dict[int, str]:
        """Process id -> command line."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if f"{MARKER}={self.identity}".encode() in (entry / "environ").read_bytes():
                    found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
        return found

    def workers(self) -> list[int]:
        """Ids of the processes that hold the models."""
        return sorted(pid for pid, command in self.processes().items() if command.startswith("ray::_Host"))

    def wait_until_gone(self) -> float:
        """Seconds until driver and workers have ended. Ray's agents may live another minute; they hold nothing."""
        started = time.monotonic()
        self.process.wait(PATIENCE_S)
        while workers := self.workers():
            if time.monotonic() - started > PATIENCE_S:
                raise SystemExit(f"workers {workers} still run {PATIENCE_S:.0f} s after the driver ended")
            time.sleep(0.1)
        return time.monotonic() - started


def prepare(work: Path, steps: int, arguments: argparse.Namespace) -> list[str]:
    """Make model and prompts; return the command of a run without its folder."""
    make_random_model(work / "model", seed=0)
    problems = ArithmeticTask().split("train", 16, seed=0)
    rows = [
        rl_record(
            data_source="arithmetic",
            question=p.question,
            ground_truth=p.answer,
            split="train",
            index=i,
            category=p.kind,
        )
        for i, p in enumerate(problems)
    ]
    write_parquet(work / "prompts.parquet", rows, RL_SCHEMA)
    return [
        *(sys.executable, "-m", "verl.trainer.main_ppo", "device=cpu", f"model.path={work / 'model'}"),
        *(f"data.train_files={work / 'prompts.parquet'}", f"data.val_files={work / 'prompts.parquet'}"),
        *("data.train_batch_size=4", "data.max_response_length=12", "actor.ppo_mini_batch_size=2"),
        *("rollout.n=4", "rollout.kv_cache_memory_mb=32", "rollout.max_num_seqs=16", "calculator.diff_stride=2"),
        *("rollout.max_num_batched_tokens=16", "actor.optim.lr=1e-3", "reward_manager.add_reward=true"),
        *(
            f"trainer.n_gpus_per_node={arguments.workers}",
            f"trainer.total_training_steps={steps}",
            "trainer.total_epochs=1000",
            "trainer.max_restarts=0",
        ),
        *("trainer.max_ckpt_to_keep=3", "trainer.test_freq=10", "trainer.save_hf_model=false"),
        *(f"trainer.save_freq={arguments.save_freq}", f"trainer.async_save={str(not arguments.synchronous).lower()}"),
    ]


def num_records(folder: Path) -> int:
    """Complete lines in the run's metrics."""
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def records(folder: Path) -> list[dict[str, object]]:
    """The run's metrics without timing."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{n: v for n, v in json.loads(line).items() if not n.startswith(TIMING_PREFIXES)} for line in lines]


def await_moment(run: Run, rng: random.Random, saving: bool) -> str | None:
    """Wait for the next moment to kill; return what it is, or None if the run ends first."""
    before, wanted = num_records(run.folder), rng.choice([0, 1, 1, 2])
    started = time.monotonic()

    def reached() -> bool:
        if saving:
            return any(run.folder.glob(".global_step_*.unfinished"))
        return num_records(run.folder) >= before + wanted and len(run.workers()) > 0

    while not reached():
        if run.process.poll() is not None:
            return None
        if time.monotonic() - started > PATIENCE_S:
            raise SystemExit(f"no progress in {PATIENCE_S:.0f} s; see {run.log}")
        time.sleep(0.002)
    time.sleep(rng.uniform(0, 0.2) if saving else rng.uniform(0, 3))
    if run.process.poll() is not None:
        return None
    # What the run does now, which may differ from what was waited for.
    return "saving" if any(run.folder.glob(".global_step_*.unfinished")) else "training" if wanted else "starting"


def kill(run: Run, rng: random.Random) -> str:
    """Send SIGKILL to the driver or to one of the workers; return which."""
    workers = run.workers()
    if workers and rng.random() < 0.5:
        os.kill(rng.choice(workers), signal.SIGKILL)
        return "worker"
    os.kill(run.process.pid, signal.SIGKILL)
    return "driver"


def finish(run: Run) -> None:
    """Wait for an undisturbed run."""
    if code := run.process.wait():
        raise SystemExit(f"the run failed with exit code {code}; see {run.log}")


def report(rows: list[list[str]], equal: bool, steps: int, arguments: argparse.Namespace) -> str:
    """The result as a page of Markdown."""
    verdict = "equal bit for bit" if equal else "DIFFERENT"
    lines = [
        "# Killed and resumed",
        "",
        f"A run of {steps} steps on {arguments.workers} CPU workers, killed {len(rows)} times by SIGKILL and resumed "
        f"each time by the same command; {hardware()}, {today()}. Made by `python benchmarks/kill_test.py`, "
        f"seed {arguments.seed}, `trainer.save_freq={arguments.save_freq}`, "
        f"`trainer.async_save={str(not arguments.synchronous).lower()}`.",
        "",
        f"`metrics.jsonl` against that of an uninterrupted run, timing aside: **{verdict}**.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{'---|' * len(COLUMNS)}",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="of the moments and victims")
    parser.add_argument("--save-freq", type=int, default=3)
    parser.add_argument("--synchronous", action="store_true", help="trainer.async_save=false")
    parser.add_argument("--out", type=Path, help="Markdown file to write the result to")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    rng, console = random.Random(arguments.seed), Console()
    # Enough that the run has not finished before the last kill.
    steps = 3 * arguments.kills
    with tempfile.TemporaryDirectory(prefix="kill_test_") as temporary:
        work = Path(temporary)
        command = prepare(work, steps, arguments)
        killed, alone = work / "killed", work / "alone"
        rows: list[list[str]] = []
        while len(rows) < arguments.kills:
            run = Run([*command, f"trainer.default_local_dir={killed}"], killed)
            moment = await_moment(run, rng, saving=len(rows) % 3 == 2)
            if moment is None:
                finish(run)
                break
            victim = kill(run, rng)
            gone = run.wait_until_gone()
            newest = max(checkpoints(killed), default=None)
            start = "none: from the beginning" if newest is None else str(newest)
            rows.append([str(len(rows) + 1), victim, moment, str(num_records(killed)), start, f"{gone:.1f} s"])
            console.print(*rows[-1], sep="  ")
        finish(Run([*command, f"trainer.default_local_dir={killed}"], killed))
        finish(Run([*command, f"trainer.default_local_dir={alone}"], alone))
        equal = records(killed) == records(alone)
    table = Table(*COLUMNS)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print(f"{len(rows)} kills; metrics of {steps} steps {'equal bit for bit' if equal else 'DIFFERENT'}")
    if arguments.out:
        arguments.out.write_text(report(rows, equal, steps, arguments))
    sys.exit(0 if equal and len(rows) == arguments.kills else 1)


if __name__ == "__main__":
    main()
