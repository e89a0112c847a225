"""What a worker group says of its workers' calls: peak memory and traces."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from verl.single_controller import WorkerGroup

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def laborers(ray_session) -> Iterator[WorkerGroup]:
    environment = {"PYTHONPATH": str(Path(__file__).parent)}
    group = WorkerGroup("laborer:Laborer", None, (), 1, 2, "cpu", environment)
    yield group
    group.close()


def test_the_peak_is_that_of_the_largest_worker_since_last_asked(laborers):
    laborers.take_peak_memory()
    assert laborers.run("hold", [1, 1]) == [0, 1]
    small = laborers.take_peak_memory()
    assert laborers.run("hold", [1, 300]) == [0, 1]
    laborers.run("hold", [1, 1])
    large = laborers.take_peak_memory()
    assert 250 << 20 < large.used - small.used < 350 << 20
    assert laborers.take_peak_memory() is None
    # What was given back counts no more.
    laborers.run("hold", [1, 1])
    assert laborers.take_peak_memory().used < small.used + (100 << 20)


def test_every_worker_writes_what_it_did_between_start_and_stop(laborers, tmp_path):
    laborers.start_profile()
    laborers.run("multiply")
    paths = [tmp_path / "profile" / f"{rank}.json.gz" for rank in range(2)]
    laborers.stop_profile(paths)
    laborers.run("hold", [1, 1])
    for path in paths:
        with gzip.open(path) as file:
            names = {event["name"] for event in json.load(file)["traceEvents"]}
        assert {"multiply", "aten::mm"} <= names
        assert "hold" not in names
