"""Every prefix's spectrum against a float64 SVD of the explicitly centred prefix, and its invariances."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.spectral.prefixes import (
    clean_chunks,
    effective_rank,
    prefix_functionals,
    prefix_singular_values,
    rank_eps,
    response_entropy,
    traditional_rank,
)

seeds = st.integers(0, 2**31 - 1)
sizes = st.tuples(st.integers(2, 12), st.integers(1, 9))


def random_hidden(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def reference_singular_values(rows):
    rows = rows.double()
    return torch.linalg.svdvals(rows - rows.mean(0))


def all_prefixes(length):
    return torch.arange(length + 1)[None]


def test_effective_rank_of_literal_spectra():
    spectra = torch.tensor([[2.0, 2.0, 0.0], [3.0, 1.0, 0.0], [5.0, 0.0, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    # shares (3/4, 1/4): entropy log 4 - (3/4) log 3, so the rank is 4 / 3^(3/4)
    expected = torch.tensor([2.0, 4 / 3**0.75, 1.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(effective_rank(spectra), expected, rtol=1e-14, atol=0)


def test_response_entropy_of_literal_spectra():
    spectra = torch.tensor([[2.0, 2.0], [math.sqrt(3.0), 1.0], [5.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    expected = torch.tensor([math.log(2), math.log(4) - 0.75 * math.log(3), 0.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(response_entropy(spectra), expected, rtol=1e-14, atol=1e-15)


def test_traditional_rank_counts_values_above_the_threshold():
    # threshold 10 * max(3, 4) * 0.01 = 0.4; a value on the threshold does not count
    spectra = torch.tensor([[10.0, 0.5, 0.4], [10.0, 0.3, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    for rows, width in [(3, 4), (4, 3)]:
        assert traditional_rank(spectra, rows, width, eps=0.01).tolist() == [2.0, 1.0, 0.0]


def test_functionals_of_an_empty_spectrum():
    empty = torch.zeros(2, 0, dtype=torch.float64)
    assert effective_rank(empty).tolist() == [1.0, 1.0]
    assert response_entropy(empty).tolist() == [0.0, 0.0]
    assert traditional_rank(empty, rows=0, width=4, eps=1e-7).tolist() == [0.0, 0.0]


def test_response_entropy_survives_squares_out_of_range():
    spectra = torch.tensor([[1e200, 1e200], [1e-200, 1e-200]], dtype=torch.float64)
    expected = torch.full((2,), math.log(2), dtype=torch.float64)
    torch.testing.assert_close(response_entropy(spectra), expected)


def test_numerical_rank_precision_is_at_most_coarse_as_float32():
    assert rank_eps(torch.float64) == 2.0**-52
    assert rank_eps(torch.float32) == 2.0**-23
    assert rank_eps(torch.bfloat16) == 2.0**-23


def test_square_corners_have_two_equal_singular_values():
    # The centred corners of a square of side 2: both columns have norm 2 and are orthogonal.
    corners = torch.tensor([[[1.0, 1.0], [1.0, 3.0], [3.0, 1.0], [3.0, 3.0]]])
    lengths, rows = torch.tensor([4]), torch.tensor([[0, 1, 2, 4]])
    values = prefix_singular_values(corners, lengths, rows)
    expected = torch.tensor([[[0.0, 0.0], [0.0, 0.0], [math.sqrt(2), 0.0], [2.0, 2.0]]], dtype=torch.float64)
    torch.testing.assert_close(values, expected, rtol=1e-14, atol=1e-14)
    result = prefix_functionals(corners, lengths, rows)
    torch.testing.assert_close(result.effective_rank, torch.tensor([[1.0, 1.0, 1.0, 2.0]], dtype=torch.float64))
    torch.testing.assert_close(
        result.response_entropy, torch.tensor([[0.0, 0.0, 0.0, math.log(2)]], dtype=torch.float64)
    )
    assert result.traditional_rank.tolist() == [[0.0, 0.0, 1.0, 2.0]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("length", "width"), [(30, 48), (40, 12), (24, 24)])
def test_every_prefix_matches_svd(dtype, length, width):
    # Power-law column scales and a large common offset, as in the hidden states of language models.
    scales = torch.arange(1, width + 1, dtype=torch.float64) ** -1.0
    hidden = (random_hidden(0, 3, length, width).cumsum(1) * scales + 30.0).to(dtype)
    lengths = torch.tensor([length, length - 5, 7])
    rows = torch.minimum(torch.arange(length + 1), lengths[:, None])
    values = prefix_singular_values(hidden, lengths, rows)
    result = prefix_functionals(hidden, lengths, rows)
    for response, prefix in [(0, length), (0, 17), (0, 2), (1, length), (1, 13), (2, 7), (2, 3)]:
        k = int(rows[response, prefix])
        expected = reference_singular_values(hidden[response, :k])
        actual = values[response, prefix, : len(expected)]
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6 * float(expected[0]))
        shares, energy = expected / expected.sum(), expected**2 / (expected**2).sum()
        entropy = -(shares * shares.clamp(min=1e-300).log()).sum()
        assert float(result.effective_rank[response, prefix]) == pytest.approx(float(entropy.exp()), rel=1e-6)
        energy_entropy = float(-(energy * energy.clamp(min=1e-300).log()).sum())
        assert float(result.response_entropy[response, prefix]) == pytest.approx(energy_entropy, rel=1e-6, abs=1e-12)


def test_a_large_common_offset_costs_no_accuracy():
    hidden = random_hidden(0, 1, 30, 40)
    lengths, rows = torch.tensor([30]), torch.tensor([[2, 11, 30]])
    # 2^16 + x loses 16 bits of x before any of this code runs: shift first, then compare against that.
    shifted = hidden + 2.0**16
    expected = prefix_singular_values(shifted - 2.0**16, lengths, rows)
    torch.testing.assert_close(prefix_singular_values(shifted, lengths, rows), expected, rtol=1e-9, atol=1e-9)


def test_rank_of_rows_that_span_fewer_dimensions():
    hidden = random_hidden(1, 1, 20, 3) @ random_hidden(2, 3, 16) + 5.0
    for states in (hidden, hidden.float()):
        rank = prefix_functionals(states, torch.tensor([20]), torch.tensor([[1, 2, 3, 4, 5, 20]])).traditional_rank
        assert rank.tolist() == [[0.0, 1.0, 2.0, 3.0, 3.0, 3.0]]


@pytest.mark.parametrize("width", [3, 40])
@pytest.mark.parametrize("value", [0.0, 0.1, -1e4])
def test_equal_rows_are_degenerate(width, value):
    hidden = torch.full((2, 20, width), value)
    hidden[1, 12:] += random_hidden(0, 8, width).float()
    rows = torch.tensor([[20, 11, 2, 1, 0], [12, 11, 2, 1, 0]])
    result = prefix_functionals(hidden, torch.tensor([20, 20]), rows)
    assert torch.equal(result.effective_rank, torch.ones(2, 5, dtype=torch.float64))
    assert torch.equal(result.response_entropy, torch.zeros(2, 5, dtype=torch.float64))
    assert torch.equal(result.traditional_rank, torch.zeros(2, 5, dtype=torch.float64))


@given(seeds, sizes)
@settings(max_examples=25, deadline=None)
def test_what_lies_past_the_length_never_matters(seed, size):
    length, width = size
    hidden = random_hidden(seed, 2, length, width)
    padded = torch.cat([hidden, torch.full((2, 3, width), math.nan, dtype=torch.float64)], dim=1)
    lengths = torch.tensor([length, length])
    rows = all_prefixes(length).repeat(2, 1)
    for actual, expected in zip(
        prefix_functionals(padded, lengths, rows), prefix_functionals(hidden, lengths, rows), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@given(seeds, sizes)
@settings(max_examples=25, deadline=None)
def test_responses_do_not_see_each_other(seed, size):
    length, width = size
    generator = torch.Generator().manual_seed(seed)
    hidden = random_hidden(seed, 5, length, width)
    lengths = torch.randint(0, length + 1, (5,), generator=generator)
    rows = torch.minimum(all_prefixes(length), lengths[:, None])
    order = torch.randperm(5, generator=generator)
    whole = prefix_functionals(hidden, lengths, rows)
    permuted = prefix_functionals(hidden[order], lengths[order], rows[order])
    for actual, expected in zip(permuted, whole, strict=True):
        torch.testing.assert_close(actual, expected[order], rtol=1e-9, atol=1e-9)


@given(seeds, sizes, st.floats(0.01, 100.0))
@settings(max_examples=25, deadline=None)
def test_rotation_shift_and_scale_do_not_matter(seed, size, scale):
    length, width = size
    hidden = random_hidden(seed, 1, length, width)
    rotation = torch.linalg.qr(random_hidden(seed + 1, width, width)).Q
    shift = random_hidden(seed + 2, width)
    lengths, rows = torch.tensor([length]), all_prefixes(length)
    moved = prefix_functionals(scale * (hidden @ rotation + shift), lengths, rows)
    for actual, expected in zip(moved, prefix_functionals(hidden, lengths, rows), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


@given(seeds, sizes, st.integers(1, 4))
@settings(max_examples=25, deadline=None)
def test_effective_rank_lies_between_one_and_the_rank(seed, size, inner):
    length, width = size
    hidden = random_hidden(seed, 1, length, inner) @ random_hidden(seed + 1, inner, width)
    rows = all_prefixes(length)
    result = prefix_functionals(hidden, torch.tensor([length]), rows)
    bound = torch.minimum((rows - 1).clamp(min=1), torch.tensor(min(inner, width)))
    assert (result.effective_rank >= 1).all()
    assert (result.effective_rank <= bound + 1e-9).all()
    assert (result.traditional_rank <= bound).all()
    assert (result.response_entropy <= result.effective_rank.log() + 1e-9).all()


@pytest.mark.parametrize("scale", [1e-180, 1e180])
def test_extreme_scales_stay_in_range(scale):
    hidden = random_hidden(0, 1, 6, 4)
    lengths, rows = torch.tensor([6]), torch.tensor([[6]])
    expected = prefix_singular_values(hidden, lengths, rows)
    torch.testing.assert_close(prefix_singular_values(hidden * scale, lengths, rows) / scale, expected)


def test_chunks_cover_the_batch_within_the_limit():
    hidden = random_hidden(0, 7, 10, 4).float()
    lengths = torch.tensor([3, 10, 0, 1, 10, 7, 2])
    # One response of 10 rows needs 8 * 3 * 10 * (4 + 4) bytes, so two fit; later chunks are shorter and hold more.
    chunks = list(clean_chunks(hidden, lengths, bytes_limit=2 * 8 * 3 * 10 * 8))
    assert [index.numel() for index, _ in chunks] == [2, 2, 2]
    assert [rows.shape[1] for _, rows in chunks] == [10, 7, 2]
    assert sorted(torch.cat([index for index, _ in chunks]).tolist()) == [0, 1, 3, 4, 5, 6]
    for index, rows in chunks:
        for i, response in zip(index.tolist(), rows, strict=True):
            n = int(lengths[i])
            assert torch.equal(response[:n], hidden[i, :n].double())
            assert not response[n:].any()


def test_chunking_does_not_change_the_result(monkeypatch):
    hidden, lengths = random_hidden(0, 4, 9, 5), torch.tensor([9, 4, 8, 6])
    rows = torch.minimum(torch.arange(10), lengths[:, None])
    whole = prefix_functionals(hidden, lengths, rows)
    monkeypatch.setattr("verl.spectral.prefixes.clean_chunks", lambda h, n: clean_chunks(h, n, bytes_limit=1))
    for actual, expected in zip(prefix_functionals(hidden, lengths, rows), whole, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def test_empty_batch():
    result = prefix_functionals(torch.zeros(0, 4, 3), torch.zeros(0, dtype=torch.int64), torch.zeros(0, 2).long())
    assert [tuple(values.shape) for values in result] == [(0, 2)] * 3


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_nonfinite_valid_row_names_the_response(bad):
    hidden = random_hidden(0, 4, 5, 3)
    hidden[2, 3, 1] = bad
    lengths = torch.tensor([2, 5, 4, 3])
    with pytest.raises(ValueError, match="response 2: .*NaN or infinity"):
        prefix_functionals(hidden, lengths, lengths[:, None])


def test_shapes_and_ranges_are_checked():
    hidden, lengths = random_hidden(0, 2, 5, 3), torch.tensor([5, 4])
    with pytest.raises(ValueError, match=r"hidden: expected floating point \[B, T, D\]"):
        prefix_functionals(hidden[0], lengths, lengths[:, None])
    with pytest.raises(ValueError, match=r"lengths: expected integers \[2\]"):
        prefix_functionals(hidden, lengths[:1], lengths[:, None])
    with pytest.raises(ValueError, match="between 0 and the 5 padded rows"):
        prefix_functionals(hidden, torch.tensor([6, 4]), lengths[:, None])
    with pytest.raises(ValueError, match="between 0 rows and the response's length"):
        prefix_functionals(hidden, lengths, torch.tensor([[5], [5]]))
    with pytest.raises(ValueError, match=r"prefix_rows: expected integers \[2, P\]"):
        prefix_functionals(hidden, lengths, lengths)
