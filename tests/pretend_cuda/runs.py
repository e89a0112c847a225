"""Runs the paths and the deliberate mistakes, and counts operations and waits.

python -m tests.pretend_cuda.runs FOLDER RESULT.json
"""

import json
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from tests.pretend_cuda import paths  # isort: skip  # before torch

import torch
import torch.distributed as dist

from tests.pretend_cuda.mistakes import MISTAKES
from tests.pretend_cuda.pretend import pretend_cuda


def run(path: paths.DevicePath) -> dict[str, Any]:
    """What happened: error, seconds, operations of the device, waits as [file, function, kind, count], and by line."""
    began, error = time.perf_counter(), ""
    with pretend_cuda() as gpu:
        try:
            path(gpu)
        except Exception as raised:  # whatever it is, it is the result
            error = f"{type(raised).__name__}: {raised}"
            traceback.print_exc()
    counts: Counter[tuple[str, str, str]] = Counter()
    lines: dict[str, int] = {}
    for (kind, place), count in gpu.waits.items():
        counts[place.file, place.function, kind] += count
        lines[f"{place.file}:{place.line} {kind}"] = count
    waits = [[*key, count] for key, count in sorted(counts.items())]
    seconds = round(time.perf_counter() - began, 2)
    return {"error": error, "seconds": seconds, "operations": gpu.operations, "waits": waits, "lines": lines}


def main(place: str, result: str, *names: str) -> None:
    """Run the paths named, or all of them and the mistakes."""
    paths.folder = Path(place)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    every = paths.PATHS | MISTAKES
    Path(result).write_text(json.dumps({name: run(every[name]) for name in names or every}))


if __name__ == "__main__":
    main(*sys.argv[1:])
