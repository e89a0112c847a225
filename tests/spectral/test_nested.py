"""The parts of the nested method."""

import pytest
import torch

from verl.spectral import SpectralOptions, prefix_functionals
from verl.spectral.bounds import MAX_BYTES
from verl.spectral.functions import SUM_S, SUM_S_LOG_S
from verl.spectral.nested import _block_pivots, _gram_pivots, lower_gram, nested_sums
from verl.spectral.nodes import node_set
from verl.spectral.responses import Chunk
from verl.spectral.slices import finish

NODES = node_set((SUM_S, SUM_S_LOG_S), 2.5e-7, 1e6)


def random_rows(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def chunk_of(rows, lengths):
    """Responses as they are: not scaled."""
    return Chunk(rows, torch.arange(len(rows)), torch.tensor(lengths), rows.new_ones(len(rows)), rows.shape[1])


def contrasts(rows, lengths):
    return chunk_of(rows, lengths).all_contrasts()


def test_literal_contrasts():
    rows = torch.tensor([[[0.0], [2.0], [4.0]]], dtype=torch.float64)
    # sqrt(1/2) (2 - 0) and sqrt(2/3) (4 - 1)
    expected = torch.tensor([[[0.0], [2**0.5], [6**0.5]]], dtype=torch.float64)
    torch.testing.assert_close(contrasts(rows, [3]), expected)


def test_contrasts_of_every_prefix_have_its_centred_scatter():
    rows = random_rows(0, 2, 9, 4) + 5
    states = contrasts(rows, [9, 9])
    for k in range(1, 10):
        centred = rows[:, :k] - rows[:, :k].mean(1, keepdim=True)
        leading = states[:, :k]
        torch.testing.assert_close(leading.mT @ leading, centred.mT @ centred)


def test_contrasts_past_the_end_are_zero():
    rows = random_rows(0, 1, 5, 2)
    rows[0, 3:] = torch.nan
    states = contrasts(rows, [3])
    assert states[0, 1:3].all() and not states[0, 3:].any()


@pytest.mark.parametrize("size", [1, 2, 4, 7])
def test_contrasts_block_by_block_are_those_of_all(size):
    chunk = chunk_of(random_rows(0, 2, 9, 4), [9, 5])
    torch.testing.assert_close(torch.cat(list(chunk.contrasts(size)), dim=1), chunk.all_contrasts(), rtol=1e-14, atol=0)


def test_equal_rows_have_no_contrasts():
    assert not contrasts(torch.full((1, 50, 3), 0.1, dtype=torch.float64) - 0.1, [50]).any()


@pytest.mark.parametrize("rows", [1, 127, 128, 300])
def test_lower_gram(rows):
    states = random_rows(0, 2, rows, 5)
    torch.testing.assert_close(finish(lower_gram(states)).tril(), (states @ states.mT).tril())


@pytest.mark.parametrize("workspace", [1, 10**6])
@pytest.mark.parametrize("size", [30, 11], ids=["one block", "blocks"])
def test_determinants(size, workspace):
    chunk = chunk_of(random_rows(0, 2, 30, 8), [30, 30])
    states, needed = chunk.all_contrasts(), [27, 27]
    shifts = torch.tensor([[1.0, 0.1], [30.0, 1e-3]], dtype=torch.float64)
    if size == 30:
        pivots, valid = finish(_gram_pivots(states @ states.mT, shifts, needed, workspace))
        assert not pivots[:, :, 27:].any()
    else:
        pivots, valid = finish(_block_pivots(chunk, size, shifts, needed, workspace))
    assert (valid >= 27).all()
    logs = pivots.cumsum(-1)
    for response in range(2):
        for k in (1, 2, 9, 27):
            scatter = states[response, :k].mT @ states[response, :k]
            for shift, actual in zip(shifts[response], logs[response, :, k - 1], strict=True):
                expected = torch.linalg.slogdet(torch.eye(8).double() + scatter / shift).logabsdet
                torch.testing.assert_close(actual, expected)


def ranks(hidden, ks, method):
    lengths, prefixes = torch.tensor([len(hidden)]), torch.tensor([ks])
    results = prefix_functionals(hidden[None], lengths, prefixes, ["effective_rank"], SpectralOptions(method))
    return results["effective_rank"][0]


def nested_ranks(hidden, ks):
    return ranks(hidden, ks, "nested")


def exact_ranks(hidden, ks):
    return ranks(hidden, ks, "svd")


@pytest.mark.parametrize("first", [1, 2, 3, 5])
@pytest.mark.parametrize("size", [(400, 150), (200, 300)])
def test_several_massive_tokens_first(first, size):
    hidden = random_rows(0, *size)
    hidden[:first, 3] += 1e4
    ks = [first + 2, 50, 151, min(size), size[0]]
    torch.testing.assert_close(nested_ranks(hidden, ks), exact_ranks(hidden, ks), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("large", "small", "value"), [(30, 8, 3e-5), (60, 64, 1e-5), (400, 400, 1e-5), (5, 4, 1e-5)])
def test_a_gap_in_the_spectrum_hides_nothing(large, small, value):
    rank = large + small
    left = torch.linalg.qr(random_rows(0, rank + 40, rank + 1) - random_rows(0, rank + 40, rank + 1).mean(0)).Q[
        :, :rank
    ]
    right = torch.linalg.qr(random_rows(1, rank + 40, rank)).Q
    hidden = (left * torch.tensor([1.0] * large + [value] * small, dtype=torch.float64)) @ right.mT
    ks = [len(hidden)]
    torch.testing.assert_close(nested_ranks(hidden, ks), exact_ranks(hidden, ks), rtol=1e-6, atol=0)


def test_later_tokens_do_not_even_change_where_shifts_fall():
    hidden = random_rows(0, 60, 40)
    longer = torch.cat([hidden, 7.3 * random_rows(1, 20, 40)])
    ks = [3, 10, 41, 60]
    torch.testing.assert_close(nested_ranks(longer, ks), nested_ranks(hidden, ks), rtol=1e-11, atol=0)


@pytest.mark.parametrize("ratio", [1e130, 1e150, 1e158, 1e200])
def test_rows_of_hardly_comparable_size(ratio):
    # Beyond the range of squares the response is decomposed instead.
    hidden = random_rows(0, 30, 20)
    hidden[10:] *= ratio
    ks = [3, 9, 10, 11, 12, 30]
    torch.testing.assert_close(nested_ranks(hidden, ks), exact_ranks(hidden, ks), rtol=1e-6, atol=0)


@pytest.mark.parametrize("method", ["nested", "eigh", "svd", "auto"])
def test_entropies_of_rows_of_hardly_comparable_size(method):
    small = random_rows(0, 10, 20)
    hidden = torch.cat([small, 1e165 * random_rows(1, 20, 20)])[None]
    names, rows = ["effective_rank", "response_entropy"], torch.tensor([[3, 9, 10]])
    expected = prefix_functionals(small[None], torch.tensor([10]), rows, names, SpectralOptions("svd"))
    actual = prefix_functionals(hidden, torch.tensor([30]), rows, names, SpectralOptions(method))
    for name in names:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-6, atol=0)


def test_eigenvalues_of_many_equal_rows_invent_no_rank():
    points = random_rows(0, 2, 64)
    hidden = points[[0] + [1] * 8999]
    names, whole = ["traditional_rank", "effective_rank"], torch.tensor([[9000]])
    result = prefix_functionals(hidden[None], torch.tensor([9000]), whole, names)
    assert float(result["traditional_rank"]) == 1.0
    assert float(result["effective_rank"]) == pytest.approx(1.0, abs=1e-9)


def test_responses_that_fail_are_named_and_their_neighbours_are_not():
    rows = random_rows(0, 2, 12, 6)
    rows[1, :8] *= 1e-160
    chunk, prefixes = chunk_of(rows, [12, 12]), torch.tensor([[5, 12], [5, 12]])
    result = finish(nested_sums(chunk, prefixes, NODES, 10**6, MAX_BYTES))
    assert result.failed.tolist() == [False, True]
    alone = finish(nested_sums(chunk.select(~result.failed), prefixes[:1], NODES, 10**6, MAX_BYTES))
    torch.testing.assert_close(result.sums[:, :1], alone.sums)


def test_a_long_response_of_two_points():
    # Rounding of many equal contrasts must end neither in an exception nor in a wrong value.
    points = random_rows(0, 2, 4)
    hidden = points[torch.arange(9000) % 2]
    hidden[1:] = points[1]
    ranks = nested_ranks(hidden, [2, 5000, 9000])
    torch.testing.assert_close(ranks, torch.ones(3, dtype=torch.float64), rtol=1e-6, atol=0)
