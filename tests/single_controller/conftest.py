"""Real worker groups over Ray."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from verl.single_controller.worker_group import WorkerGroup


@pytest.fixture(scope="module")
def start(ray_session: None) -> Callable[..., WorkerGroup]:
    """Starts as many workers of a class in ``example_workers`` as asked, with a config."""
    environment = {"PYTHONPATH": str(Path(__file__).parent)}
    return lambda name, size, config=None: WorkerGroup(
        f"example_workers:{name}", config, (), 1, size, "cpu", environment
    )


@pytest.fixture(scope="module")
def workers(start: Callable[..., WorkerGroup]) -> Iterator[WorkerGroup]:
    """Four of them."""
    group = start("ExampleWorker", 4)
    yield group
    group.close()
