"""Functionals of literal spectra."""

import math

import torch

from tests.kit import f64
from verl.spectral.functions import effective_rank, rank_eps, response_entropy, traditional_rank


def test_effective_rank_of_literal_spectra():
    spectra = f64([2.0, 2.0, 0.0], [3.0, 1.0, 0.0], [5.0, 0.0, 0.0], [0.0, 0.0, 0.0])
    # shares (3/4, 1/4): entropy log 4 - (3/4) log 3, so the rank is 4 / 3^(3/4)
    torch.testing.assert_close(effective_rank(spectra), f64(2.0, 4 / 3**0.75, 1.0, 1.0), rtol=1e-14, atol=0)
    assert effective_rank(spectra[:2, :0]).tolist() == [1.0, 1.0]


def test_response_entropy_of_literal_spectra():
    spectra = f64([2.0, 2.0], [math.sqrt(3.0), 1.0], [5.0, 0.0], [0.0, 0.0])
    expected = f64(math.log(2), math.log(4) - 0.75 * math.log(3), 0.0, 0.0)
    torch.testing.assert_close(response_entropy(spectra), expected, rtol=1e-14, atol=1e-15)
    assert response_entropy(spectra[:2, :0]).tolist() == [0.0, 0.0]
    # Squares out of float64's range.
    extreme = f64([1e200, 1e200], [1e-200, 1e-200])
    torch.testing.assert_close(response_entropy(extreme), f64(math.log(2), math.log(2)))


def test_traditional_rank_counts_values_above_the_threshold():
    # threshold 10 * max(3, 4) * 0.01 = 0.4; a value on the threshold does not count
    spectra = f64([10.0, 0.5, 0.4], [10.0, 0.3, 0.0], [0.0, 0.0, 0.0])
    for rows, width in [(3, 4), (4, 3)]:
        assert traditional_rank(spectra, rows, width, eps=0.01).tolist() == [2.0, 1.0, 0.0]
    assert traditional_rank(spectra[:, :0], rows=0, width=4, eps=1e-7).tolist() == [0.0, 0.0, 0.0]


def test_numerical_rank_precision_is_at_most_coarse_as_float32():
    assert rank_eps(torch.float64) == 2.0**-52
    assert rank_eps(torch.float32) == 2.0**-23
    assert rank_eps(torch.bfloat16) == 2.0**-23
