"""The parts of the nested method."""

import pytest
import torch

from verl.spectral import SpectralOptions, prefix_functionals
from verl.spectral.bounds import MAX_BYTES
from verl.spectral.factor import log_pivots
from verl.spectral.functions import SUM_S, SUM_S_LOG_S
from verl.spectral.nested import nested_sums
from verl.spectral.nodes import node_set
from verl.spectral.responses import Chunk


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


def test_prefix_contrasts_have_centred_scatter():
    chunk = chunk_of(random_rows(0, 2, 9, 4) + 5, [9, 5])
    chunk.hidden[1, 5:] = torch.nan
    states = chunk.all_contrasts()
    for k in range(1, 10):
        centred = chunk.hidden[:, :k] - chunk.hidden[:, :k].mean(1, keepdim=True)
        present = chunk.lengths >= k
        leading = states[:, :k]
        torch.testing.assert_close((leading.mT @ leading)[present], (centred.mT @ centred)[present])
    # Nothing past the end, nor of equal rows.
    assert not states[1, 5:].any()
    assert not contrasts(torch.full((1, 50, 3), 0.1, dtype=torch.float64) - 0.1, [50]).any()
    for size in (1, 2, 4, 7):
        torch.testing.assert_close(torch.cat(list(chunk.contrasts(size)), dim=1), states, rtol=1e-14, atol=0)


def ranks(hidden, ks, method="nested"):
    lengths, prefixes = torch.tensor([len(hidden)]), torch.tensor([ks])
    results = prefix_functionals(hidden[None], lengths, prefixes, ["effective_rank"], SpectralOptions(method))
    return results["effective_rank"][0]


def assert_exact(hidden, ks):
    torch.testing.assert_close(ranks(hidden, ks), ranks(hidden, ks, "svd"), rtol=1e-6, atol=0)


@pytest.mark.parametrize("first", [1, 2, 3, 5])
@pytest.mark.parametrize("size", [(400, 150), (200, 300)])
def test_several_massive_tokens_first(first, size):
    hidden = random_rows(0, *size)
    hidden[:first, 3] += 1e4
    assert_exact(hidden, [first + 2, 50, 151, min(size), size[0]])


@pytest.mark.parametrize(("large", "small", "value"), [(30, 8, 3e-5), (60, 64, 1e-5), (400, 400, 1e-5), (5, 4, 1e-5)])
def test_gap_in_the_spectrum_hides_nothing(large, small, value):
    rank = large + small
    rows = random_rows(0, rank + 40, rank + 1)
    left = torch.linalg.qr(rows - rows.mean(0)).Q[:, :rank]
    right = torch.linalg.qr(random_rows(1, rank + 40, rank)).Q
    hidden = (left * torch.tensor([1.0] * large + [value] * small, dtype=torch.float64)) @ right.mT
    assert_exact(hidden, [len(hidden)])


def test_later_tokens_do_not_even_change_where_shifts_fall():
    hidden = random_rows(0, 60, 40)
    longer = torch.cat([hidden, 7.3 * random_rows(1, 20, 40)])
    ks = [3, 10, 41, 60]
    torch.testing.assert_close(ranks(longer, ks), ranks(hidden, ks), rtol=1e-11, atol=0)


@pytest.mark.parametrize("ratio", [1e130, 1e150, 1e158, 1e200])
def test_rows_of_hardly_comparable_size(ratio):
    # Beyond the range of squares the response is decomposed instead.
    hidden = random_rows(0, 30, 20)
    hidden[10:] *= ratio
    assert_exact(hidden, [3, 9, 10, 11, 12, 30])


@pytest.mark.parametrize("method", ["nested", "eigh", "svd", "auto"])
def test_entropies_of_rows_of_hardly_comparable_size(method):
    small = random_rows(0, 10, 20)
    hidden = torch.cat([small, 1e165 * random_rows(1, 20, 20)])[None]
    names, rows = ["effective_rank", "response_entropy"], torch.tensor([[3, 9, 10]])
    expected = prefix_functionals(small[None], torch.tensor([10]), rows, names, SpectralOptions("svd"))
    actual = prefix_functionals(hidden, torch.tensor([30]), rows, names, SpectralOptions(method))
    for name in names:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-6, atol=0)


def test_failed_responses_are_named_alone():
    rows = random_rows(0, 2, 12, 6)
    rows[1, :8] *= 1e-160
    chunk, prefixes = chunk_of(rows, [12, 12]), torch.tensor([[5, 12], [5, 12]])
    nodes = node_set((SUM_S, SUM_S_LOG_S), 2.5e-7, 1e6)
    result = nested_sums(chunk, prefixes, nodes, 10**6, MAX_BYTES)
    assert result.failed.tolist() == [False, True]
    alone = nested_sums(chunk.select(~result.failed), prefixes[:1], nodes, 10**6, MAX_BYTES)
    torch.testing.assert_close(result.sums[:, :1], alone.sums)


@pytest.mark.parametrize("size", [(20, 30), (64, 8)], ids=["one block", "blocks"])
def test_response_whose_factorisation_fails_is_decomposed(size, monkeypatch):
    """As happens at shifts below the rounding error of the Gram matrix, here made by hand for the second response."""

    def not_positive(gram, *others):
        gram = gram.clone()
        gram[-1, -1, -1] = -1e9
        return log_pivots(gram, *others)

    monkeypatch.setattr("verl.spectral.nested.log_pivots", not_positive)
    hidden, lengths = random_rows(0, 2, *size), torch.full((2,), size[0])
    names = ["effective_rank", "response_entropy"]
    found, exact = (
        prefix_functionals(hidden, lengths, lengths[:, None], names, SpectralOptions(method))
        for method in ("nested", "svd")
    )
    for name in names:
        torch.testing.assert_close(found[name], exact[name], rtol=1e-6, atol=0)


def test_many_equal_rows():
    # Their rounding ends neither in an exception nor in a wrong value, and invents no rank.
    names, prefixes = ["traditional_rank", "effective_rank"], torch.tensor([[2, 5000, 9000]])
    for width, method in ((4, "nested"), (64, "eigh")):
        hidden = random_rows(0, 2, width)[[0] + [1] * 8999][None]
        wanted = names[1:] if method == "nested" else names
        result = prefix_functionals(hidden, torch.tensor([9000]), prefixes, wanted, SpectralOptions(method))
        assert all(values[0].tolist() == pytest.approx([1.0] * 3, abs=1e-6) for values in result.values())
