"""A pool that loses engines: Ray's workers, which hold nothing, in worlds of two."""

import os
import signal
import time
from pathlib import Path

import pytest

from verl.cluster.failures import MachineError
from verl.single_controller.engine_pool import EnginePool
from verl.single_controller.generation import EngineCalls
from verl.single_controller.supervision import Supervision


def kill(pool: EnginePool, rank: int) -> None:
    os.kill(pool._supervisor.identities[rank].pid, signal.SIGKILL)


def test_an_engine_is_lost_and_replaced(ray_session, tmp_path):
    said: list[str] = []
    worker = ("example_workers:ExampleWorker", None, (), 1, 4, "cpu", {"PYTHONPATH": str(Path(__file__).parent)})
    watched = Supervision(logs=tmp_path, kind="engine worker")
    pool = EnginePool(*worker, workers_per_world=2, goes_on=True, say=said.append, supervision=watched)
    try:
        assert pool.run("take_as_long", 0.0) == [0, 1, 0, 1]
        engines = EngineCalls(pool, "take_as_long", 2)
        for engine in range(2):
            engines.send(engine, 5.0 if engine == 1 else 0.0)
        kill(pool, 3)
        replies = []
        while engines.busy:
            replies += engines.receive(from_all=False)
        assert sorted(replies, key=lambda reply: reply[0]) == [(0, 0), (1, None)]
        # Both of its workers are gone.
        assert pool.living == [0, 1] and pool.run_living("take_as_long", 0.0) == [0, 1]
        assert said[0].startswith("engine worker 3 on ") and said[0].endswith("; going on with 1 engines")
        deadline = time.monotonic() + 120
        while not pool.replace_lost():
            assert time.monotonic() < deadline
            # The other one works on meanwhile.
            assert pool.run_living("take_as_long", 0.1) == [0, 1]
        assert pool.living == [0, 1, 2, 3] and said[-1].endswith("takes the place of one that was lost")
        assert not pool.replace_lost() and pool.run_living("take_as_long", 0.0) == [0, 1, 0, 1]
        # A new one may be lost too; the last one, or with trainer.deterministic any, ends the attempt.
        kill(pool, 2)
        assert pool.run_living("take_as_long", 0.5) == [0, 1]
        kill(pool, 0)
        with pytest.raises(MachineError, match="engine worker 0"):
            pool.run_living("take_as_long", 0.5)
    finally:
        pool.close()
    # Of those that are missing none is started any more.
    assert not pool.replace_lost() and not pool._restarts
