"""What a worker group settles before it starts its workers."""

import pytest

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
