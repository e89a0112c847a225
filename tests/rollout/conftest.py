"""Workers with an engine, made once for a module's ``config``."""

from collections.abc import Iterator

import pytest

from tests.workers.groups import start_group
from verl.config import PPOConfig
from verl.single_controller.worker_group import WorkerGroup


@pytest.fixture(scope="module")
def group(config: PPOConfig, ray_session: None) -> Iterator[WorkerGroup]:
    group = start_group(config, 1)
    yield group
    group.close()
