"""The memory of one response, within its bound and without effect on the numbers; and what ``auto`` chooses."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from verl.rank.dynamics import base_metrics
from verl.spectral import SpectralOptions, bounds, nested, responses
from verl.spectral.bounds import MAX_BYTES, block_rows, factor_operations, response_bytes, workspace_bound
from verl.spectral.cost import cheapest_method

SPECTRAL = ["Effective Rank", "Response Entropy 1", "Log Effective Rank"]


def one_response(rows, width):
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(1, rows, width, generator=generator) * torch.arange(1, width + 1) ** -0.7 + 2


def metrics_and_peak(hidden, names, options, stride=100):
    """The metrics of prefixes, and the most bytes that were allocated meanwhile."""
    rows = hidden.shape[1]
    ends = torch.tensor([[*range(1, rows, stride), rows]])
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        metrics = base_metrics(hidden, torch.tensor([rows]), ends, names, options)
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    held = torch.tensor([event.nbytes() for event in events if event.name() == "[memory]"]).cumsum(0)
    return metrics, int(held.max())


@pytest.mark.parametrize("size", [(800, 520), (200, 520), (1300, 64), (60, 60)], ids=str)
@pytest.mark.parametrize("max_bytes", [1, 8 << 20, MAX_BYTES])
def test_blocks_within_the_bound_change_no_number(size, max_bytes):
    hidden = one_response(*size)
    options = SpectralOptions("nested", max_bytes=max_bytes, workspace_bytes=1)
    metrics, peak = metrics_and_peak(hidden, [*SPECTRAL, "Curvature"], options)
    vectors = 8 * 4 * 64 * size[0]
    curvature = 64 << 20
    assert peak <= max(workspace_bound(*size, decomposes=False, max_bytes=max_bytes) + vectors, curvature)
    expected, _ = metrics_and_peak(hidden, [*SPECTRAL, "Curvature"], SpectralOptions("nested"))
    for name, values in expected.items():
        # At the smallest shift the rounding of squares is multiplied by up to 1e7.
        torch.testing.assert_close(metrics[name], values, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("size", "max_mb", "workspace_mb"), [((900, 450), 15, 15), ((300, 300), 4, 24)], ids=str)
def test_several_shifts_stay_within_the_bound_of_a_response(size, max_mb, workspace_mb, monkeypatch):
    # Two shifts beside the Gram matrix, as of 8000 rows of 3584 columns on a GPU; and 20, where so many are allowed.
    for module in (bounds, responses, nested):
        monkeypatch.setattr(module, "BLOCK_ROWS", 128)
    assert block_rows(*size, max_mb << 20) == size[0]
    options = SpectralOptions("nested", max_bytes=max_mb << 20, workspace_bytes=workspace_mb << 20)
    _, peak = metrics_and_peak(one_response(*size), ["Effective Rank"], options)
    assert peak <= workspace_bound(*size, decomposes=False, max_bytes=max_mb << 20) + 8 * 4 * 64 * size[0]


@pytest.mark.parametrize("method", ["eigh", "svd"])
@pytest.mark.parametrize("size", [(900, 80), (1300, 150), (100, 200)], ids=str)
def test_decompositions_stay_within_the_bound(size, method):
    metrics, peak = metrics_and_peak(one_response(*size), [*SPECTRAL, "Traditional Rank"], SpectralOptions(method))
    assert peak <= workspace_bound(*size, decomposes=True, max_bytes=1) + 8 * 4 * 64 * size[0]


@pytest.mark.parametrize("width", [1536, 3584, 5120, 8192])
def test_default_bound_holds_at_any_length(width):
    for rows in (1024, 4096, 8192, 32768, 131072):
        assert response_bytes(rows, width, block_rows(rows, width)) <= MAX_BYTES
        assert workspace_bound(rows, width, decomposes=False) == MAX_BYTES


def test_literal_bytes():
    # One Gram matrix and its factor, or the rows that it is made from.
    assert response_bytes(8192, 5120, 8192) == 8 * (8192**2 + 8192 * (8192 + 200))
    # The scatter and the factor of S + t I above 256 rows; rows with temporaries, Gram matrix and factor.
    assert response_bytes(4096, 1024, 256) == 8 * (2 * 1024**2 + 4 * 256 * 1024 + 2 * 256**2 + 200 * 1280)
    assert [block_rows(8192, 5120), block_rows(32768, 5120)] == [8192, 2560]


def choose(length, width, prefixes):
    return cheapest_method(torch.tensor([length]), torch.tensor([prefixes]), width, 22)


def test_many_prefixes_are_factored_and_one_is_decomposed():
    assert choose(1, 8, [1, 0]) in ("nested", "eigh")
    assert choose(512, 896, list(range(41, 512, 40))) == "nested"
    assert choose(512, 896, list(range(2, 513))) == "nested"
    assert choose(512, 896, [512]) == "eigh"
    assert choose(2048, 16, [2048]) == "eigh"


def test_long_responses_cost_linear_time():
    assert [block_rows(512, 896), block_rows(100, 64), block_rows(4096, 64)] == [512, 100, 64]
    for width in (16, 64):
        one, two = (factor_operations(rows, width, block_rows(rows, width)) for rows in (64 * width, 128 * width))
        assert two / one == pytest.approx(2.0)
