"""The blocked factorisation against LAPACK's, for sizes around the width of a panel."""

import pytest
import torch

from verl.spectral.factor import PANEL, factor

W = PANEL["cpu"]


def random_gram(seed, batch, size, inner):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(batch, size, inner, generator=generator, dtype=torch.float64)
    return rows @ rows.mT


@pytest.mark.parametrize("size", [1, 2, W - 1, W, W + 1, 2 * W, 3 * W + 5])
def test_pivots_and_solution(size):
    gram = random_gram(size, 3, size, size + 4)
    inverse_shifts = torch.tensor([[0.1, 1.0], [2.0, 3.0], [100.0, 0.5]], dtype=torch.float64)
    border = torch.randn(3, 2, size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    workspace = torch.full((3 * 2 * (size + 1) * size,), torch.nan, dtype=torch.float64)
    # What stands above the diagonal must not matter.
    lower_half = gram.tril() + torch.full_like(gram, 7.0).triu(1)
    log_pivots, solved, valid = factor(lower_half, inverse_shifts, border, workspace)
    full = torch.eye(size, dtype=torch.float64) + gram[:, None] * inverse_shifts[:, :, None, None]
    lower = torch.linalg.cholesky(full)
    torch.testing.assert_close(log_pivots, 2 * lower.diagonal(dim1=2, dim2=3).log(), rtol=1e-10, atol=1e-12)
    expected = torch.linalg.solve_triangular(lower, border[..., None], upper=False)[..., 0]
    torch.testing.assert_close(solved, expected, rtol=1e-9, atol=1e-12)
    assert (valid == size).all()


def test_an_indefinite_matrix_is_reported_and_the_others_are_not():
    size = W + 10
    gram = random_gram(0, 2, size, size)
    gram[1, W + 3, W + 3] = -1e6
    gram[1, W + 7, W + 7] = -1e6
    workspace = torch.zeros(2 * 2 * (size + 1) * size, dtype=torch.float64)
    shifts = torch.tensor([[1.0, 2.0], [1.0, 1e-9]], dtype=torch.float64)
    log_pivots, _, valid = factor(gram, shifts, torch.ones(1, dtype=torch.float64), workspace)
    assert valid.tolist() == [[size, size], [W + 3, size]]
    assert log_pivots[0].isfinite().all()
    assert log_pivots[1, 0, : W + 3].isfinite().all()


def test_small_shifts_of_a_singular_matrix_keep_the_digits_of_a_stable_factorisation():
    # Rank 40 of 150: with t = 1e-13 of the trace a solve through the inverse of a diagonal block breaks down.
    generator = torch.Generator().manual_seed(0)
    scales = torch.logspace(0, -6, 40, dtype=torch.float64)
    rows = torch.randn(1, 150, 40, generator=generator, dtype=torch.float64) * scales
    gram = rows @ rows.mT
    inverse_shifts = torch.tensor([[1e13]], dtype=torch.float64) / gram.diagonal(dim1=1, dim2=2).sum()
    workspace = torch.zeros(151 * 150, dtype=torch.float64)
    log_pivots, _, valid = factor(gram, inverse_shifts, torch.ones(1, dtype=torch.float64), workspace)
    assert valid.tolist() == [[150]]
    eigenvalues = torch.linalg.svdvals(rows[0]) ** 2
    expected = (eigenvalues * inverse_shifts[0]).log1p().sum()
    torch.testing.assert_close(log_pivots.sum(), expected, rtol=1e-4, atol=0)
