"""Streams of random numbers: what they are, that they are uniform, and that they are independent of each other."""

import numpy as np
import pytest

from vllm_patches.streams import substream, uniforms

SIZE = 1024


@pytest.fixture(scope="module")
def table() -> np.ndarray:
    """[streams of neighbouring names, neighbouring positions]."""
    return uniforms(np.arange(SIZE)[:, None], np.arange(SIZE))


def finalise(z: int) -> int:
    """SplitMix64's finaliser in whole numbers without bounds."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return z ^ (z >> 31)


def test_numbers_are_those_of_the_definition():
    # The first number of SplitMix64 with seed 0.
    assert finalise(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF
    name = finalise((5 << 32) ^ finalise(7 + 0x9E3779B97F4A7C15))
    assert substream(5 << 32, 7) == name
    bits = finalise(name ^ finalise(41 + 0x9E3779B97F4A7C15))
    assert uniforms([name], [41]).tolist() == [(bits >> 11) / 2**53]
    assert substream(-1, -2) == substream(2**64 - 1, 2**64 - 2)


def test_a_number_depends_on_stream_and_position_alone(table: np.ndarray):
    assert uniforms([17, 3], [5, 900]).tolist() == [table[17, 5], table[3, 900]]
    assert np.array_equal(table[::-1, ::-1], uniforms(np.arange(SIZE)[::-1, None], np.arange(SIZE)[::-1]))
    assert len(np.unique(table)) == SIZE**2


def test_numbers_are_uniform(table: np.ndarray):
    assert 0 <= table.min() < 1e-5 and 1 - 1e-5 < table.max() < 1
    # Chi-squared with 255 degrees of freedom exceeds 331 once in a thousand times. The numbers are fixed.
    for numbers in (table, table[:, 0], table[0], table * 2**20 % 1, table * 2**40 % 1):
        counts = np.histogram(numbers, 256, (0, 1))[0]
        assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 331


def test_neighbours_do_not_correlate(table: np.ndarray):
    names = [substream(substream(0, 3), uid) for uid in range(SIZE)]
    derived = uniforms(np.array(names, dtype=np.uint64)[:, None], range(SIZE))
    for numbers in (table, derived):
        low, high = numbers[:-1], numbers[1:]
        pairs = [(low, high), (numbers[:, :-1], numbers[:, 1:]), (low[:, :-1], high[:, 1:]), (low[:, 1:], high[:, :-1])]
        for one, other in pairs:
            # The standard deviation of a correlation of a million numbers is 0.001.
            assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 0.004
            # Pairs fill the unit square evenly, too: 99.9% are below 331 with 255 degrees of freedom.
            counts = np.histogram2d(one.ravel(), other.ravel(), 16, [(0, 1), (0, 1)])[0]
            assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 331


def test_every_seed_prompt_and_place_has_its_own_stream():
    seeds = [(seed << 32) + step for seed in range(4) for step in range(20)]
    names = {substream(substream(substream(0, seed), uid), i) for seed in seeds for uid in range(20) for i in range(8)}
    assert len(names) == 4 * 20 * 20 * 8
