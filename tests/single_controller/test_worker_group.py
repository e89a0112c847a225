"""What a worker group settles before it starts, what it leaves if it cannot start, and how it measures calls."""

import gzip
import json
import time

import pytest
import ray

from verl.config import ConfigError
from verl.single_controller import WorkerError
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


def test_a_group_that_cannot_start_frees_its_workers(start):
    with pytest.raises(WorkerError, match="(?s)worker 1 failed in start.*no model here"):
        start("FailingWorker", 2)
    # What a user can fix is said as if it had been found in this process.
    with pytest.raises(ConfigError, match="^model.path='x': no model there$"):
        start("FailingWorker", 2, ConfigError("model.path='x': no model there"))
    deadline = time.monotonic() + 60
    while (free := ray.available_resources().get("CPU")) != (every := ray.cluster_resources()["CPU"]):
        assert time.monotonic() < deadline, f"{free} of {every} CPUs are free"
        time.sleep(0.2)


def test_the_peak_is_that_of_the_largest_worker_since_last_asked(workers):
    workers.take_peak_memory()
    assert workers.run("hold", [1] * 4) == [0, 1, 2, 3]
    small = workers.take_peak_memory()
    workers.run("hold", [1, 1, 1, 300])
    workers.run("hold", [1] * 4)
    large = workers.take_peak_memory()
    assert 250 << 20 < large.used - small.used < 350 << 20
    assert workers.take_peak_memory() is None
    # What was given back counts no more.
    workers.run("hold", [1] * 4)
    assert workers.take_peak_memory().used < small.used + (100 << 20)


def test_every_worker_writes_what_it_did_between_start_and_stop(workers, tmp_path):
    workers.start_profile()
    workers.run("multiply")
    paths = [tmp_path / "profile" / f"{rank}.json.gz" for rank in range(4)]
    workers.stop_profile(paths)
    workers.run("hold", [1] * 4)
    for path in paths:
        with gzip.open(path) as file:
            names = {event["name"] for event in json.load(file)["traceEvents"]}
        assert {"multiply", "aten::mm"} <= names
        assert "hold" not in names
