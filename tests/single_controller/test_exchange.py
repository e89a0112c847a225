"""Messages to real Ray workers, each group of which replies at its own pace."""

import pytest

from verl.single_controller.exchange import Exchange
from verl.single_controller.failures import WorkerError


@pytest.mark.parametrize("copies", [1, 2, 4])
def test_each_engine_replies_with_its_first_worker(workers, copies: int):
    engines = Exchange(workers, "take_as_long", copies)
    assert engines.num_engines == 4 // copies and not engines.busy
    for engine in range(engines.num_engines):
        # The first engine takes longest.
        engines.send(engine, 0.5 if engine == 0 else 0.0)
    order: list[tuple[int, int]] = []
    while engines.busy:
        order += engines.receive(from_all=False)
    assert sorted(order) == [(engine, engine * copies) for engine in range(4 // copies)] and order[-1] == (0, 0)


def test_all_can_be_waited_for_and_any_be_sent_more(workers):
    engines = Exchange(workers, "take_as_long", 1)
    for engine in (3, 0, 2):
        engines.send(engine, 0.0)
    assert engines.receive(from_all=True) == [(0, 0), (2, 2), (3, 3)] and not engines.busy
    engines.send(1, 30.0)
    for _ in range(3):
        engines.send(0, 0.0)
        assert engines.receive(from_all=False) == [(0, 0)]
    engines.send(2, -1.0)
    # Worker 1 still works, and nobody waits for it.
    with pytest.raises(WorkerError, match="(?s)^worker 2 on [^ ]+ failed in take_as_long:.*non-negative"):
        engines.receive(from_all=True)
