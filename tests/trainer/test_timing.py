import pytest

from verl.trainer import timing
from verl.trainer.timing import PhaseTimer


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in the list's only element."""
    now = [100.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    return now


def test_phases_add_up_by_step_and_in_total(clock: list[float]):
    entered: list[str] = []
    timer = PhaseTimer(entered.append)
    for name, seconds in [("generate", 2.0), ("update", 1.0), ("generate", 0.5)]:
        with timer.phase(name):
            clock[0] += seconds
        clock[0] += 10.0  # between phases nothing is counted
    assert entered == ["generate", "update", "generate"]
    assert timer.take_step() == {"timing_s/generate": 2.5, "timing_s/update": 1.0, "timing_s/step": 3.5}
    with timer.phase("update"):
        clock[0] += 4.0
    assert timer.take_step() == {"timing_s/update": 4.0, "timing_s/step": 4.0}
    assert timer.totals == {"generate": 2.5, "update": 5.0}


def test_a_step_without_phases_took_no_time():
    assert PhaseTimer(lambda name: None).take_step() == {"timing_s/step": 0}


def test_a_phase_that_fails_is_counted_and_its_error_goes_on(clock: list[float]):
    timer = PhaseTimer(lambda name: None)
    with pytest.raises(ZeroDivisionError), timer.phase("save"):
        clock[0] += 3.0
        raise ZeroDivisionError
    assert timer.totals == {"save": 3.0}
