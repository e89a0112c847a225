"""What a worker group settles before it starts its workers, and what is left of one that cannot start."""

import time
from pathlib import Path

import pytest
import ray

from verl.single_controller import WorkerError, WorkerGroup
from verl.single_controller.worker_group import cpu_threads


@pytest.mark.parametrize(
    ("wanted", "workers", "threads"),
    [(None, 2, 4), (None, 3, 2), (None, 16, 1), ("", 2, 4), ("6", 2, 6), ("3,2", 4, 3), ("many", 4, 2)],
)
def test_threads_of_a_worker(wanted, workers, threads, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if wanted is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", wanted)
    assert cpu_threads(workers) == threads


@pytest.mark.slow
def test_a_group_that_cannot_start_frees_its_workers(ray_session):
    before = ray.available_resources()["CPU"]
    environment = {"PYTHONPATH": str(Path(__file__).parent)}
    with pytest.raises(WorkerError, match="(?s)worker 1 failed in start.*no model here"):
        WorkerGroup("laborer:FailingLaborer", None, (), 1, 2, "cpu", environment)
    deadline = time.monotonic() + 60
    while ray.available_resources().get("CPU", 0) < before and time.monotonic() < deadline:
        time.sleep(0.2)
    assert ray.available_resources()["CPU"] == before
