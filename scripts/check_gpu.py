"""Check a GPU machine in stages: what to run there first. ``scripts/check_gpu.sh`` is its door, docs/gpu.md its page.

Every stage is a process of its own, of at most ten minutes; what they do is in scripts/gpu_checks/. One that fails
or takes too long does not keep the others from running. Each prints one line and leaves in ``--out``

- ``NN-<stage>.json``: status, reason, what to do, figures, seconds, and how it was run
- ``NN-<stage>.log``: everything that it printed
- ``NN-<stage>/``: what else it wrote, such as the folders of its runs

The exit code is 0 if a stage passed and none failed, otherwise 1.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from gpu_checks.common import FAILED, MARKER, PASSED, ROOT, SKIPPED, Record, kill_all
from gpu_checks.stages import STAGES, Stage

LIMIT_S = 600.0

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONUNBUFFERED": "1",
}
"""No stage waits for a network that is not there."""


def chosen(asked: Sequence[str]) -> list[tuple[int, Stage]]:
    """Stages by name or number, with their numbers from 1; all if none is named."""
    numbered = list(enumerate(STAGES, 1))
    if not asked:
        return numbered
    known = {key: (number, stage) for number, stage in numbered for key in (stage.name, str(number))}
    wrong = [key for key in asked if key not in known]
    if wrong:
        names = ", ".join(f"{number} {stage.name}" for number, stage in numbered)
        sys.exit(f"error: --stage {wrong[0]}: no such stage; choose among {names}")
    return [known[key] for key in asked]


def end_all(process: subprocess.Popen[bytes], identity: str) -> None:
    """Kill a stage with all that it started, and what that starts meanwhile; returns when the memory is free."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    kill_all(MARKER, identity)


def run_stage(number: int, stage: Stage, options: argparse.Namespace) -> Record:
    """Run one stage to its end or its time limit; its record, which is also written."""
    path = options.out / f"{number:02}-{stage.name}"
    result, log = path.with_suffix(".result"), path.with_suffix(".log")
    # What an earlier check has left there would be taken for this one's: a complete run has nothing more to do.
    for old in (result, path.with_suffix(".json")):
        old.unlink(missing_ok=True)
    if path.exists():
        shutil.rmtree(path)
    path.mkdir(parents=True)
    program = [str(options.stages)] if options.stages else ["-m", "gpu_checks.stages"]
    command = [sys.executable, *program, stage.name, "--device", options.device]
    command += ["--out", str(path), "--result", str(result)] + ["--toy"] * options.toy
    identity = uuid.uuid4().hex
    # Stages import what is beside this file, and the scripts that measure.
    folders = [str(ROOT / "scripts"), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH")]
    paths = os.pathsep.join(filter(None, folders))
    started = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | OFFLINE | {MARKER: identity, "PYTHONPATH": paths},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(options.limit)
            in_time = True
        except subprocess.TimeoutExpired:
            in_time = False
        finally:
            end_all(process, identity)
    record = {"stage": stage.name, "number": number, "what": stage.what, "device": options.device, "toy": options.toy}
    record |= outcome(result, process.returncode, log) if in_time else too_long(stage, options.limit, path)
    if record["status"] == FAILED:
        record.setdefault("to_do", stage.to_do)
    record |= {"seconds": round(time.monotonic() - started, 1), "command": command, "log": str(log)}
    result.unlink(missing_ok=True)
    path.with_suffix(".json").write_text(json.dumps(record, indent=2) + "\n")
    return record


def too_long(stage: Stage, limit: float, folder: Path) -> Record:
    """The outcome of a stage that was killed."""
    reason = f"took longer than {limit:g} s and was killed"
    to_do = f"see the logs below {folder}, or give it more time: --stage {stage.name} --limit {3 * limit:g}"
    return {"status": FAILED, "reason": reason, "to_do": to_do}


def outcome(result: Path, code: int, log: Path) -> Record:
    """What a stage said that ended by itself."""
    if result.is_file():
        record: Record = json.loads(result.read_text())
        return record
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return {"status": FAILED, "reason": f"ended with exit code {code}: {lines[-1][:300] if lines else 'no output'}"}


def line_of(record: Record, total: int) -> str:
    """What the terminal shows of a stage."""
    text = record["figure"] if record["status"] == PASSED else record["reason"]
    if record["status"] == FAILED:
        text += f". To do: {record['to_do']} ({record['log']})"
    return (
        f"{record['number']:2}/{total} {record['stage']:<22} {record['status']:<8} {record['seconds']:4.0f} s  {text}"
    )


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", action="append", default=[], help="name or number; may be repeated; default: all")
    parser.add_argument("--out", type=Path, help="default: outputs/check_gpu/<time>")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--toy", action="store_true", help="toy sizes; needed with --device cpu")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds after which a stage is killed")
    parser.add_argument("--list", action="store_true", help="print the stages and run nothing")
    # Its test brings stages of its own.
    parser.add_argument("--stages", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.device == "cpu" and not options.toy:
        parser.error("--device cpu: add --toy; the real sizes are for GPUs")
    if options.out is None:
        options.out = ROOT / "outputs" / "check_gpu" / datetime.now(UTC).strftime("%Y-%m-%d_%H-%M-%S")
    options.out = options.out.absolute()
    return options


def main(argv: Sequence[str]) -> int:
    """Run the stages; the exit code."""
    options = parse(argv)
    stages = chosen(options.stage)
    if options.list:
        print("\n".join(f"{number:2} {stage.name:<22} {stage.what}" for number, stage in stages))
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    # Ended by `timeout` or a job scheduler, the stage in progress ends too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    print(f"{len(stages)} stages of at most {options.limit:g} s each, into {options.out}", flush=True)
    records = []
    for number, stage in stages:
        records.append(run_stage(number, stage, options))
        print(line_of(records[-1], len(STAGES)), flush=True)
    counts = {status: sum(r["status"] == status for r in records) for status in (PASSED, FAILED, SKIPPED)}
    print(", ".join(f"{count} {status}" for status, count in counts.items()) + f": {options.out}")
    # What was skipped has not been checked.
    return int(counts[FAILED] > 0 or counts[PASSED] == 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
