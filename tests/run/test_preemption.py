"""Signals of the scheduler: when a run ends after them, and what it saves."""

import signal
from collections.abc import Iterator

import pytest

from verl.run.preemption import Preempted, Preemption


@pytest.fixture
def handlers() -> Iterator[list[object]]:
    """Those of before, which must be back at the end."""
    numbers = (signal.SIGTERM, signal.SIGUSR1)
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    yield [signal.SIG_IGN, signal.SIG_IGN]
    assert [signal.getsignal(number) for number in numbers] == [signal.SIG_IGN, signal.SIG_IGN]
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_step_is_finished_and_saved(handlers, number):
    preemption, saved = Preemption(0), []
    with preemption.listening(), preemption.finishing_steps():
        preemption.after_step(3, lambda: saved.append(3))
        signal.raise_signal(number)
        preemption.check()  # while workers compute
        with pytest.raises(Preempted) as caught:
            preemption.after_step(4, lambda: saved.append(4))
    assert saved == [4] and str(caught.value) == f"{number.name}: step 4 is saved"


def test_without_a_step_there_is_nothing_to_finish(handlers):
    preemption = Preemption(0)
    with preemption.listening():
        preemption.check()
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Preempted) as caught:
            preemption.check()
    assert str(caught.value) == "SIGTERM before the first step"


def test_a_step_that_takes_too_long_is_abandoned(handlers, monkeypatch):
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    preemption = Preemption(30)
    with preemption.listening(), preemption.finishing_steps():
        signal.raise_signal(signal.SIGUSR1)
        now = 130.0
        preemption.check()
        now = 130.5
        with pytest.raises(Preempted, match="^SIGUSR1: the step took longer than trainer.preemption_grace_s=30$"):
            preemption.check()


def test_a_second_signal_ends_the_process_at_once(handlers, monkeypatch):
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    preemption = Preemption(0)
    with preemption.listening(), preemption.finishing_steps():
        signal.raise_signal(signal.SIGUSR1)
        # The same one again: Slurm sends it to every process, and the shell hands on its own.
        now = 101.0
        signal.raise_signal(signal.SIGUSR1)
        now = 110.0
        with pytest.raises(SystemExit) as caught:
            signal.raise_signal(signal.SIGTERM)
    assert caught.value.code == 75
