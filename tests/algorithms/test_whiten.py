import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algorithms.advantages import whitened


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_literal_values():
    # Tokens 1, 5, 3, 3: mean 3, squared deviations 4 + 4 + 0 + 0 over 3, std sqrt(8/3). The 9s are padding.
    advantages = f64([1.0, 5.0], [3.0, 9.0], [9.0, 3.0])
    a = 2 / ((8 / 3) ** 0.5 + 1e-8)
    torch.testing.assert_close(
        whitened(advantages, torch.tensor([[1, 1], [1, 0], [0, 1]])),
        f64([-a, a], [0.0, 0.0], [0.0, 0.0]),
        rtol=1e-12,
        atol=0,
    )


def test_the_epsilon_is_added_to_the_deviation():
    # Mean 0 and std 1e-8: half of the divisor is the epsilon.
    size = 1e-8 / 2**0.5
    expected = f64([0.5 / 2**0.5, -0.5 / 2**0.5])
    torch.testing.assert_close(whitened(f64([size, -size]), torch.ones(1, 2)), expected, rtol=1e-12, atol=0)


def test_nothing_to_compare_gives_zero():
    nan = float("nan")
    assert whitened(f64([0.5, 0.5], [0.5, 7.0]), torch.tensor([[1, 1], [1, 0]])).tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert whitened(f64([4.0, nan]), torch.tensor([[1, 0]])).tolist() == [[0.0, 0.0]]
    assert whitened(f64([4.0, nan]), torch.tensor([[0, 0]])).tolist() == [[0.0, 0.0]]


def test_computed_in_float64_and_returned_in_the_input_dtype():
    # Around 2**24 float32 resolves whole numbers only: a float32 sum would lose the deviations.
    result = whitened(torch.tensor([[16777214.0, 16777215.0, 16777216.0]]), torch.ones(1, 3))
    assert result.dtype == torch.float32
    assert result.tolist() == [[-1.0, 0.0, 1.0]]


@given(st.integers(0, 2**31 - 1), st.integers(2, 6), st.floats(0.01, 100.0), st.floats(-100.0, 100.0))
@settings(max_examples=40, deadline=None)
def test_unit_scale_whatever_the_scale_and_offset(seed, num_tokens, scale, offset):
    generator = torch.Generator().manual_seed(seed)
    advantages = torch.randn(3, num_tokens, generator=generator, dtype=torch.float64)
    mask = torch.rand(3, num_tokens, generator=generator) < 0.7
    mask[0] = True
    result = whitened(advantages, mask)
    assert float(result[mask].mean()) == pytest.approx(0.0, abs=1e-10)
    assert float(result[mask].std()) == pytest.approx(1.0, rel=1e-4)
    assert not result[~mask].any()
    torch.testing.assert_close(whitened(scale * advantages + offset, mask), result, rtol=1e-4, atol=1e-4)
