"""Dealing requests to engines: the real queue and the real loop, with engines that count steps."""

import pytest

from tests.single_controller.simulated_engines import fixed_shares, ideal, simulate, skewed
from verl.rollout.queue import EngineRoom, RequestQueue


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize(("num_engines", "slots"), [(4, 64), (64, 16)])
def test_engines_end_together_unless_one_response_outlasts_them_all(num_engines: int, slots: int, deterministic: bool):
    """The least that any order can take is the longest response, or all tokens over all slots."""
    for per_slot in (1, 64):
        lengths = skewed(per_slot * slots * num_engines, seed=per_slot)
        assert 5 < max(lengths) / 300 < 20
        makespan = simulate(lengths, num_engines, slots, deterministic).makespan
        assert makespan < 1.1 * ideal(lengths, num_engines, slots)


def test_no_engine_waits_for_one_that_was_dealt_long_responses():
    """Responses to one prompt are alike in length, so a share of few prompts may be long."""
    dealt = fixed = 0.0
    for seed in range(2):
        lengths = skewed(8 * 64 * 16, seed, alike=0.7)
        dealt += simulate(lengths, 64, 16, deterministic=True).makespan
        fixed += fixed_shares(lengths, 64, 16)
    assert dealt < 0.95 * fixed


def test_who_gets_what_depends_on_lengths_alone():
    lengths = skewed(2000, seed=0)
    alike, unlike = (simulate(lengths, 4, 16, True, speeds=speeds) for speeds in ([1.0] * 4, [1.0, 0.5, 2.0, 0.7]))
    assert alike.dealt == unlike.dealt
    # Where it may depend on time, the faster engine does more.
    free = simulate(lengths, 4, 16, False, speeds=[1.0, 0.5, 2.0, 0.7])
    shares = [len(dealt) for dealt in free.dealt]
    assert shares[2] > shares[0] > shares[3] > shares[1] and free.makespan < unlike.makespan


def test_what_fits_is_dealt_at_once_in_the_order_of_the_prompts():
    queue = RequestQueue(10, [EngineRoom(4, 9)] * 3)
    assert queue.first() == [range(0, 3), range(3, 6), range(6, 10)] and queue.left == 0
    queue = RequestQueue(2, [EngineRoom(4, 9)] * 3)
    assert [len(share) for share in queue.first()] == [0, 1, 1]


def test_an_engine_whose_cache_is_full_gets_nothing_more():
    queue = RequestQueue(100, [EngineRoom(32, 8), EngineRoom(32, 8)])
    assert queue.first() == [range(0, 8), range(8, 16)]
    # Nothing waits: there is room for half as many again. One waits although a slot is free: the cache is full.
    queue.finish(0, 0, 0)
    queue.finish(1, 4, 1)
    assert queue.take(0) == range(16, 21) and queue.take(1) == range(21, 21)
    queue.finish(1, 3, 0)
    assert queue.take(1) == range(21, 33)


def test_work_is_taken_ahead_while_much_is_left():
    queue = RequestQueue(46, [EngineRoom(8, 99), EngineRoom(8, 99)])
    # 30 are left beside the slots: a quarter of them for each.
    assert queue.first() == [range(0, 15), range(15, 30)]
    queue.finish(0, 8, 0)
    assert queue.take(0) == range(30, 35)
    queue.finish(1, 12, 0)
    assert queue.take(1) == range(35, 42) and queue.left == 4


def test_a_small_cache_is_used_and_not_flooded():
    lengths = skewed(3000, seed=1)
    cache = 20 * 400
    engines = simulate(lengths, 4, 64, True, cache=cache)
    # Each token is held while later ones of its response are decoded.
    least = sum(length * length / 2 for length in lengths) / (4 * cache)
    assert engines.makespan < 2.5 * least
