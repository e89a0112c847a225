"""Requests to fake engines, their responses into the stores, and the progress shown meanwhile."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from tests.evaluation.example_tasks import FakeEngines, make_task
from verl.evaluation.generation import generate_missing
from verl.evaluation.progress import EvaluationDisplay
from verl.evaluation.tasks import EvaluationTask
from verl.rollout.queue import EngineRoom
from verl.rollout.requests import sample_stream

N = 5
FOUR = ["1"] * 4


def display(output: io.StringIO) -> EvaluationDisplay:
    return EvaluationDisplay(Console(file=output, width=120))


def generate(tasks: list[EvaluationTask], workers: FakeEngines) -> dict[tuple[str, float, int, int], str]:
    """Generate what is missing; the responses of all."""
    stores = {task: task.open_store() for task in tasks}
    shown = display(io.StringIO())
    shown.start("title", 1, 1)
    try:
        generate_missing(stores, N, 7, workers, [EngineRoom(2, 2)] * len(workers.queues), True, shown)
    finally:
        for store in stores.values():
            store.__exit__()
    return {
        (task.benchmark, task.temperature, *key): sample.response
        for task, store in stores.items()
        for key, sample in store.samples.items()
    }


@pytest.mark.parametrize("num_engines", [1, 3])
def test_every_sample_is_generated_once_from_its_own_stream(num_engines: int, tmp_path: Path):
    tasks = [make_task(tmp_path, FOUR), make_task(tmp_path, FOUR, temperature=1.0)]
    tasks.append(make_task(tmp_path, ["1", "2"], "products"))
    workers = FakeEngines(num_engines)
    responses = generate(tasks, workers)
    assert len(workers.asked) == len(responses) == (4 + 4 + 2) * N
    assert responses["products", 0.6, 1, 3].startswith(f"[1, 2] {sample_stream(7, 'products', 1, 3)} ")
    assert {request.temperature for request in workers.asked} == {0.6, 1.0}
    assert not any(workers.queues) and workers.largest_queue < 10
    # No two samples share a stream.
    assert len({sample_stream(7, "sums", i, j) for i in range(100) for j in range(100)}) == 10_000


def test_off_a_terminal_progress_is_lines(monkeypatch: pytest.MonkeyPatch):
    now = 0.0
    monkeypatch.setattr("verl.evaluation.progress.time.monotonic", lambda: now)
    output = io.StringIO()
    with display(output) as shown:
        shown.start("run@0", 4, 8)
        shown.running()
        for problems in (1, 1, 2):
            now += 10
            shown.generated(problems, 2 * problems, 100 * problems)
        shown.finish()
    lines = output.getvalue().splitlines()
    assert lines[0] == "run@0: 8 samples of 4 problems to generate; starting the engines"
    assert lines[1] == "run@0: 2/4 problems  10 tok/s  20 s left"
    assert lines[-1].startswith("run@0: 4/4 problems") and lines[-1].endswith("0 s left")
