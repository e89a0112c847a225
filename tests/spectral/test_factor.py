"""The blocked factorisation against LAPACK's, for sizes around the width of a panel."""

import pytest
import torch

from verl.spectral.factor import PANEL, decompose_head, head_columns, log_pivots

W = PANEL["cpu"]


def random_gram(seed, batch, size, inner):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(batch, size, inner, generator=generator, dtype=torch.float64)
    return rows @ rows.mT


def factored(gram, inverse_shifts, head=None):
    workspace = torch.full(
        (inverse_shifts.numel() * gram.shape[1] * (gram.shape[1] + 8),), torch.nan, dtype=torch.float64
    )
    return log_pivots(gram, inverse_shifts, workspace, head)


@pytest.mark.parametrize("head", [0, 5, W, 2 * W])
@pytest.mark.parametrize("size", [1, 2, W - 1, W, W + 1, 2 * W, 3 * W + 5])
def test_pivots(size, head):
    gram = random_gram(size, 3, size, size + 4)
    inverse_shifts = torch.tensor([[0.1, 1.0], [2.0, 3.0], [100.0, 0.5]], dtype=torch.float64)
    # What stands above the diagonal must not matter.
    lower_half = gram.tril() + torch.full_like(gram, 7.0).triu(1)
    logs, valid = factored(lower_half, inverse_shifts, decompose_head(lower_half, head) if head else None)
    full = torch.eye(size, dtype=torch.float64) + gram[:, None] * inverse_shifts[:, :, None, None]
    expected = 2 * torch.linalg.cholesky(full).diagonal(dim1=2, dim2=3).log()
    torch.testing.assert_close(logs, expected, rtol=1e-10, atol=1e-12)
    assert (valid == size).all()


@pytest.mark.parametrize("head", [0, W + 5])
def test_indefinite_matrix_is_reported_and_the_others_are_not(head):
    size = W + 10
    gram = random_gram(0, 2, size, size)
    gram[1, W + 3, W + 3] = -1e6
    gram[1, W + 7, W + 7] = -1e6
    inverse_shifts = torch.tensor([[1.0, 2.0], [1.0, 1e-9]], dtype=torch.float64)
    logs, valid = factored(gram, inverse_shifts, decompose_head(gram, head) if head else None)
    assert valid.tolist() == [[size, size], [W + 3, size]]
    assert logs[0].isfinite().all()
    assert logs[1, 0, : W + 3].isfinite().all()


def test_head_of_a_longer_matrix_serves_its_first_rows():
    gram, inverse_shifts = random_gram(1, 2, 150, 200), torch.tensor([[1.0, 50.0]] * 2, dtype=torch.float64)
    head = decompose_head(gram, 60)
    for rows in (40, 60, 61, 130):
        part = gram[:, :rows, :rows]
        torch.testing.assert_close(factored(part, inverse_shifts, head)[0], factored(part, inverse_shifts)[0])


def test_heads_are_whole_panels_on_cpus():
    assert [head_columns(rows, "cpu") for rows in (191, 192, 256, 512, 4096)] == [0, 2 * W, 2 * W, 5 * W, 5 * W]
    assert head_columns(4096, "cuda") == 0


@pytest.mark.parametrize("head", [0, 20, 40, 60])
def test_small_shifts_of_singular_matrix_keep_digits(head):
    # Rank 40 of 150: with t = 1e-13 of the trace a solve through the inverse of a diagonal block breaks down.
    generator = torch.Generator().manual_seed(0)
    scales = torch.logspace(0, -6, 40, dtype=torch.float64)
    rows = torch.randn(1, 150, 40, generator=generator, dtype=torch.float64) * scales
    gram = rows @ rows.mT
    inverse_shifts = torch.tensor([[1e13]], dtype=torch.float64) / gram.diagonal(dim1=1, dim2=2).sum()
    logs, valid = factored(gram, inverse_shifts, decompose_head(gram, head) if head else None)
    assert valid.tolist() == [[150]]
    # Of every prefix, not only of the whole.
    for end in (30, 60, 100, 150):
        eigenvalues = torch.linalg.svdvals(rows[0, :end]) ** 2
        expected = (eigenvalues * inverse_shifts[0]).log1p().sum()
        torch.testing.assert_close(logs[0, 0, :end].sum(), expected, rtol=1e-4, atol=0)
