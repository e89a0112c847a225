"""The code that runs on a GPU, without one: right devices and dtypes, the CPU's numbers, and no wait that is not known.

``waits.tsv`` holds, for each path of ``paths.py``, how often the host waits for the device, by file and function. It is
a ratchet: a new wait fails, and after one has gone the file is written again by

    VERL_WRITE_WAITS=1 python -m pytest tests/pretend_cuda/test_paths.py
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT

WAITS = Path(__file__).with_name("waits.tsv")
COLUMNS = "path\tfile\tfunction\twait\tcount"
NAMES = [line.partition("\t")[0] for line in WAITS.read_text().splitlines()[1:]]

pytestmark = [pytest.mark.slow, pytest.mark.pretend_cuda]

Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="session")
def results(compiled: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What happened on each path, all of them in one process."""
    folder = tmp_path_factory.mktemp("paths")
    command = [sys.executable, "-m", "tests.pretend_cuda.runs", str(folder), str(folder / "results.json")]
    done = subprocess.run(command, cwd=ROOT, env=compiled, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    found: Results = json.loads((folder / "results.json").read_text())
    if os.environ.get("VERL_WRITE_WAITS"):
        WAITS.write_text(table(found))
    return found


def table(results: Results) -> str:
    """The text of ``waits.tsv``; a path without waits has a line, too."""
    lines = [COLUMNS]
    for name, result in results.items():
        if not name.startswith("mistake"):
            lines += ["\t".join(map(str, [name, *wait])) for wait in result["waits"] or [["-", "-", "-", 0]]]
    return "\n".join(lines) + "\n"


def test_every_path_gives_the_cpus_numbers(results: Results):
    failed = {name: r["error"] for name, r in results.items() if r["error"] and not name.startswith("mistake")}
    assert not failed
    assert all(result["operations"] > 0 for result in results.values())
    assert list(dict.fromkeys(NAMES)) == [name for name in results if not name.startswith("mistake")]


def test_no_wait_is_added(results: Results):
    assert table(results) == WAITS.read_text(), "see the head of this file; where: " + json.dumps(
        {name: r["lines"] for name, r in results.items()}
    )


def test_micro_batches_are_sent_and_scored_without_a_wait(results: Results):
    """Two micro-batches have one wait, for their results; a step has those for the norm, the log and offload."""
    ends = {"to_host", "Learner._step", "clip_gradients"}
    for name, result in results.items():
        if name.startswith(("score, p", "score, s", "update", "loss")):
            offload = {"Offloaded._load", "Offloaded._unload"} if "offloaded" in name else set()
            assert {wait[1] for wait in result["waits"]} <= ends | offload, name


@pytest.mark.parametrize(
    ("mistake", "error"),
    [
        ("offsets of 64 bits", "varlen_attn: offsets must be int32"),
        ("positions on the host", "Expected all tensors to be on the same device"),
        ("results read too early", "hidden states hold NaN"),
        ("memory freed too early", "memory was freed without torch.cuda.synchronize"),
        ("draws by the host", "Expected a 'cuda' device type for generator but found 'cpu'"),
    ],
)
def test_deliberate_mistake_is_detected(results: Results, mistake: str, error: str):
    assert re.search(error, results[f"mistake: {mistake}"]["error"])


def test_reading_a_number_counts_as_a_wait(results: Results):
    waits = results["mistake: a number looked at"]["waits"]
    known = results["update, packed"]["waits"]
    added = [wait for wait in waits if wait not in known]
    assert added == [["verl/workers/actor.py", "Actor._loss", "_local_scalar_dense", 2]]
