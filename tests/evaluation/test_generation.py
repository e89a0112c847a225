"""Requests to the engines and their responses into the stores, with engines that are faked."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from tests.evaluation.fakes import FakeWorkers
from verl.evaluation.benchmarks import Problem
from verl.evaluation.generation import Work, generate_missing
from verl.evaluation.jobs import Job
from verl.evaluation.progress import EvaluationDisplay
from verl.evaluation.targets import Target
from verl.rollout.requests import sample_seed

N = 5


def make_job(folder: Path, benchmark: str = "sums", temperature: float = 0.6, problems: int = 4) -> Job:
    return Job(
        target=Target("run", 0, "model", "chat", 8),
        benchmark=benchmark,
        temperature=temperature,
        problems=[Problem(i, f"question {i}", "1", "arithmetic", {}, None) for i in range(problems)],
        prompts=[[i, i + 1] for i in range(problems)],
        folder=folder / benchmark / f"T{temperature:g}",
        settings={"temperature": temperature},
    )


def display(output: io.StringIO | None = None) -> EvaluationDisplay:
    return EvaluationDisplay(Console(file=output or io.StringIO(), width=120))


def generate(jobs: list[Job], workers: FakeWorkers, n: int = N) -> dict[tuple[str, float, int, int], str]:
    """Generate what is missing; the responses of all."""
    works = [Work(job, job.open_store()) for job in jobs]
    shown = display()
    shown.start("title", 1, sum(len(work.missing(n)) for work in works))
    try:
        generate_missing(works, n, 7, workers, len(workers.queues), 2, shown)
    finally:
        for work in works:
            work.store.__exit__()
    return {
        (work.job.benchmark, work.job.temperature, *key): sample.response
        for work in works
        for key, sample in work.store.samples.items()
    }


@pytest.mark.parametrize("num_engines", [1, 3])
def test_every_sample_is_generated_once_with_its_own_seed(num_engines: int, tmp_path: Path):
    jobs = [make_job(tmp_path), make_job(tmp_path, temperature=1.0), make_job(tmp_path, "products", problems=2)]
    workers = FakeWorkers(num_engines)
    responses = generate(jobs, workers)
    assert len(workers.asked) == len(responses) == (4 + 4 + 2) * N
    assert responses["products", 0.6, 1, 3].startswith(f"[1, 2] {sample_seed(7, 'products', 1, 3)} ")
    assert {request.temperature for request in workers.asked} == {0.6, 1.0}
    # Engines are filled alike, and no further than twice the sequences that they decode at once.
    assert workers.largest_queue == 4 and not any(workers.queues)
    # Not twice the same: one seed for each sample.
    assert len({sample_seed(7, "sums", i, j) for i in range(100) for j in range(100)}) > 9_990


def test_what_a_dead_worker_had_returned_is_kept_and_the_rest_is_generated(tmp_path: Path):
    jobs = [make_job(tmp_path / "killed")]
    first = FakeWorkers(2, dies_at=4)
    with pytest.raises(RuntimeError, match="the worker died"):
        generate(jobs, first)
    path = jobs[0].folder / "samples.jsonl"
    kept = len(path.read_text().splitlines())
    assert 0 < kept < 4 * N
    # As a process that was killed while it wrote.
    path.write_bytes(path.read_bytes()[:-3])
    second = FakeWorkers(1, slowest=1)
    assert generate(jobs, second) == generate([make_job(tmp_path / "whole")], FakeWorkers(3))
    assert len(second.asked) == 4 * N - (kept - 1)
    assert generate(jobs, nothing_to_do := FakeWorkers(1)) and nothing_to_do.calls == 0


def test_more_samples_add_to_those_there(tmp_path: Path):
    jobs = [make_job(tmp_path)]
    few = generate(jobs, FakeWorkers(1), n=2)
    workers = FakeWorkers(1)
    many = generate(jobs, workers, n=5)
    assert len(workers.asked) == 4 * 3
    assert few.items() <= many.items() and len(many) == 20


def test_off_a_terminal_lines_tell_the_progress(monkeypatch: pytest.MonkeyPatch):
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr("verl.evaluation.progress.time.monotonic", lambda: float(next(clock)))
    output = io.StringIO()
    with display(output) as shown:
        shown.start("run@0", 4, 8)
        shown.running()
        shown.generated(1, 2, 100)
        shown.generated(1, 2, 100)
        shown.generated(2, 4, 200)
        shown.finish()
    lines = output.getvalue().splitlines()
    assert lines[0] == "run@0: 8 samples of 4 problems to generate; starting the engines"
    assert lines[1] == "run@0: 2/4 problems  10 tok/s  left 20 s"
    assert lines[-1].startswith("run@0: 4/4 problems") and lines[-1].endswith("left 0 s")


def test_on_a_terminal_a_bar():
    output = io.StringIO()
    shown = EvaluationDisplay(Console(file=output, width=120, force_terminal=True))
    with shown:
        shown.start("run@0", 4, 8)
        shown.generated(1, 2, 100)
        shown.say("said")
        shown.finish()
    assert "1/4 problems" in output.getvalue() and "tok/s" in output.getvalue() and "said" in output.getvalue()
