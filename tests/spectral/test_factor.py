"""The blocked factorisation against LAPACK's, for sizes around the width of a panel."""

import pytest
import torch

from verl.spectral.factor import PANEL, log_pivots
from verl.spectral.slices import finish

W = PANEL["cpu"]


def random_gram(seed, batch, size, inner):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(batch, size, inner, generator=generator, dtype=torch.float64)
    return rows @ rows.mT


def factored(gram, inverse_shifts):
    workspace = torch.full((inverse_shifts.numel() * gram.shape[1] ** 2,), torch.nan, dtype=torch.float64)
    return finish(log_pivots(gram, inverse_shifts, workspace))


@pytest.mark.parametrize("size", [1, 2, W - 1, W, W + 1, 2 * W, 3 * W + 5])
def test_pivots(size):
    gram = random_gram(size, 3, size, size + 4)
    inverse_shifts = torch.tensor([[0.1, 1.0], [2.0, 3.0], [100.0, 0.5]], dtype=torch.float64)
    # What stands above the diagonal must not matter.
    lower_half = gram.tril() + torch.full_like(gram, 7.0).triu(1)
    logs, valid = factored(lower_half, inverse_shifts)
    full = torch.eye(size, dtype=torch.float64) + gram[:, None] * inverse_shifts[:, :, None, None]
    expected = 2 * torch.linalg.cholesky(full).diagonal(dim1=2, dim2=3).log()
    torch.testing.assert_close(logs, expected, rtol=1e-10, atol=1e-12)
    assert (valid == size).all()


def test_an_indefinite_matrix_is_reported_and_the_others_are_not():
    size = W + 10
    gram = random_gram(0, 2, size, size)
    gram[1, W + 3, W + 3] = -1e6
    gram[1, W + 7, W + 7] = -1e6
    logs, valid = factored(gram, torch.tensor([[1.0, 2.0], [1.0, 1e-9]], dtype=torch.float64))
    assert valid.tolist() == [[size, size], [W + 3, size]]
    assert logs[0].isfinite().all()
    assert logs[1, 0, : W + 3].isfinite().all()


def test_small_shifts_of_a_singular_matrix_keep_the_digits_of_a_stable_factorisation():
    # Rank 40 of 150: with t = 1e-13 of the trace a solve through the inverse of a diagonal block breaks down.
    generator = torch.Generator().manual_seed(0)
    scales = torch.logspace(0, -6, 40, dtype=torch.float64)
    rows = torch.randn(1, 150, 40, generator=generator, dtype=torch.float64) * scales
    gram = rows @ rows.mT
    inverse_shifts = torch.tensor([[1e13]], dtype=torch.float64) / gram.diagonal(dim1=1, dim2=2).sum()
    logs, valid = factored(gram, inverse_shifts)
    assert valid.tolist() == [[150]]
    eigenvalues = torch.linalg.svdvals(rows[0]) ** 2
    expected = (eigenvalues * inverse_shifts[0]).log1p().sum()
    torch.testing.assert_close(logs.sum(), expected, rtol=1e-4, atol=0)
