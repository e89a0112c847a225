"""Work in turns, and memory that is held while vLLM profiles."""

import gc

import pytest
import torch

from vllm_patches.slices import Job, Launched, beside, finish
from vllm_patches.worker import reserving


def counting(done):
    for number in range(5):
        done.append(number)
        yield
    return "result"


def test_turn_does_at_least_one_slice():
    done = []
    job = Job(counting(done))
    assert not job.turn(0.0) and done == [0]
    assert not job.turn(0.0) and done == [0, 1] and job.result is None
    assert job.turn(None) and done == [0, 1, 2, 3, 4] and job.result == "result"
    # Nothing happens to a job that is done.
    assert job.turn(0.0) and job.result == "result"


def test_a_turn_is_skipped_while_the_device_is_busy():
    class Event:
        def __init__(self):
            self.finished = False

        def query(self):
            return self.finished

    event, done = Event(), []

    def work():
        while len(done) < 3:
            done.append(len(done))
            yield event

    job = Job(work())
    job.turn(0.0)
    assert not job.turn(0.0) and done == [0]
    event.finished = True
    assert not job.turn(0.0) and done == [0, 1]
    # Whoever waits for the result does not ask.
    event.finished = False
    assert job.turn(None) and done == [0, 1, 2]


class GpuEvent:
    """An event of a GPU that has happened when the test says so, ``at`` milliseconds."""

    def __init__(self, at: float, happened: bool = True):
        self.at, self.happened = at, happened

    def query(self):
        return self.happened

    def elapsed_time(self, end):
        return end.at - self.at


def test_a_turn_launches_what_the_device_can_do_in_its_time():
    launched = []

    def work():
        for number in range(100):
            launched.append(Launched(GpuEvent(10.0 * number), GpuEvent(10.0 * number + 4), awaited=False))
            yield launched[-1]

    job = Job(work())
    # Nothing is known of the first slice, so that it is alone; it takes 4 ms.
    assert not job.turn(0.1) and len(launched) == 1
    assert not job.turn(0.1) and len(launched) == 26
    assert job.unpaid == pytest.approx(0.004)
    # Still at work: nothing more is launched.
    launched[-1].end.happened = False
    assert not job.turn(0.1) and len(launched) == 26
    launched[-1].end.happened = True
    assert not job.turn(0.1) and len(launched) == 51 and job.unpaid == pytest.approx(26 * 0.004)


def test_what_the_host_reads_next_ends_a_turn_until_it_is_there():
    event, done = GpuEvent(1.0, happened=False), []

    def work():
        yield Launched(GpuEvent(0.0), event, awaited=True)
        done.append("read")
        yield
        return "result"

    job = Job(work())
    assert not job.turn(10.0) and not job.turn(10.0) and done == []
    event.happened = True
    assert job.turn(10.0) and done == ["read"] and job.result == "result"


def test_a_job_that_is_given_up_releases_what_it_holds():
    released = []

    def work():
        try:
            yield
            yield
        finally:
            released.append(True)

    job = Job(work())
    job.turn(0.0)
    job.close()
    assert released == [True]


@pytest.mark.parametrize("work", [[1, 2], pytest.param(counting([]), id="sliced")])
def test_reducers_with_and_without_slices(work):
    assert finish(beside(work, torch.device("cpu"))) in ([1, 2], "result")


def test_the_reserved_bytes_are_held_during_the_profile_run():
    num_bytes, seen = 123_457, []

    def held():
        return any(type(found) is torch.Tensor and found.nbytes == num_bytes for found in gc.get_objects())

    reserving(lambda: seen.append(held()), torch.device("cpu"), num_bytes)()
    assert seen == [True] and not held()
