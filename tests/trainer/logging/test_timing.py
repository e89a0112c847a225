import pytest
import torch

from verl.single_controller.profiling import MemoryPeak
from verl.trainer.logging import timing
from verl.trainer.logging.timing import PhaseTimer, Work


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
    assert timer.take_step().seconds == {"generate": 2.5, "update": 1.0}
    with timer.phase("update"):
        clock[0] += 4.0
    assert timer.take_step().seconds == {"update": 4.0}
    assert timer.take_step() == ({}, {}, {})
    assert timer.totals == {"generate": 2.5, "update": 5.0}


def test_a_phase_that_fails_is_counted_and_its_error_goes_on(clock: list[float]):
    timer = PhaseTimer(lambda name: None)
    with pytest.raises(ZeroDivisionError), timer.phase("save"):
        clock[0] += 3.0
        raise ZeroDivisionError
    assert timer.totals == {"save": 3.0}


def test_work_is_summed_by_phase():
    timer = PhaseTimer(lambda name: None)
    timer.count("update", Work.of(torch.tensor([3, 5])))
    timer.count("update", Work.of(torch.tensor([2])))
    # Of 6 tokens the first 4 were there already, of 3 the first.
    timer.count("generate", Work.of(torch.tensor([6, 3]), torch.tensor([4, 1])))
    assert timer.take_step().work == {"update": Work(10.0, 38.0), "generate": Work(4.0, 28.0)}


def test_a_phase_has_the_largest_peak_of_its_own_calls():
    peaks = [MemoryPeak(9, 9)]  # of a call before the first phase

    def take() -> MemoryPeak | None:
        taken = peaks[0] if peaks else None
        peaks.clear()
        return taken

    timer = PhaseTimer(lambda name: None, take)
    for name, peak in [("generate", MemoryPeak(5, 7)), ("verify", None), ("generate", MemoryPeak(4, 8))]:
        with timer.phase(name):
            peaks += [] if peak is None else [peak]
    assert timer.take_step().peaks == {"generate": MemoryPeak(5, 8)}
