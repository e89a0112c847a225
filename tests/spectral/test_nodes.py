"""Fits of spectral functions by logarithms."""

import pytest
import torch

from verl.spectral.functions import ENERGY, ENERGY_LOG_S, SUM_S, SUM_S_LOG_S, SpectralFunction
from verl.spectral.nodes import CLUSTER, node_set

RANK = (SUM_S, SUM_S_LOG_S)


def sums_of(nodes, eigenvalues):
    """The fit applied to one spectrum: ``[F]``."""
    logs = (eigenvalues[:, None] / nodes.shifts).log1p().sum(0)
    trace, norm = eigenvalues.sum()[None, None], eigenvalues.norm()[None, None]
    return nodes.sums(logs[None, :, None], trace, norm)[:, 0, 0]


@pytest.mark.parametrize("tolerance", [1e-4, 2.5e-7])
@pytest.mark.parametrize(
    "functions", [RANK, (ENERGY, ENERGY_LOG_S), (SpectralFunction(0.5),), (SpectralFunction(3.0),)]
)
def test_two_eigenvalues_anywhere_in_the_range(functions, tolerance):
    nodes = node_set(functions, tolerance, condition=1e5)
    assert nodes.error <= tolerance
    for small in torch.logspace(-10, -0.4, 97, dtype=torch.float64).tolist():
        eigenvalues = torch.tensor([1 - small, small], dtype=torch.float64)
        for function, actual in zip(functions, sums_of(nodes, eigenvalues), strict=True):
            expected = float(function(eigenvalues.sqrt()).sum())
            scale = float((eigenvalues.sqrt() ** function.power).sum())
            # Errors at 1 - small, small and the trace itself, 1.
            assert abs(float(actual) - expected) <= 3 * tolerance * scale


def test_cluster_of_small_values_counts_with_all_its_members():
    nodes = node_set(RANK, 2.5e-7, condition=1e6)
    for small in (1e-3, 1e-4, 1e-5, 1e-6):
        eigenvalues = torch.full((CLUSTER,), small**2, dtype=torch.float64)
        eigenvalues[0] = 1 - small**2 * (CLUSTER - 1)
        singular_values = eigenvalues.sqrt()
        total, total_log = sums_of(nodes, eigenvalues).tolist()
        assert total == pytest.approx(float(singular_values.sum()), rel=1e-6)
        assert abs(total_log - float(SUM_S_LOG_S(singular_values).sum())) <= 1e-6 * total


def test_one_eigenvalue_is_exact():
    nodes = node_set(RANK, 1e-3, condition=1e3)
    for value in (1.0, 0.4):
        eigenvalues = torch.tensor([value], dtype=torch.float64)
        expected = torch.stack([f(eigenvalues.sqrt()).sum() for f in RANK])
        torch.testing.assert_close(sums_of(nodes, eigenvalues), expected, rtol=1e-14, atol=1e-15)


def test_values_below_the_range_are_counted_too_low():
    nodes = node_set((SUM_S,), 1e-6, condition=1e3)
    errors = []
    for small in (1e-4, 1e-6, 1e-9):
        actual = float(sums_of(nodes, torch.tensor([1.0, small**2], dtype=torch.float64))[0])
        errors.append((1 + small - actual) / small)
        assert actual >= 1
    assert errors == sorted(errors)
    assert errors[-1] == pytest.approx(1.0, abs=1e-2)


def test_default_device_of_another_kind_does_not_matter():
    node_set.cache_clear()
    with torch.device("meta"):
        assert node_set(RANK, 1e-4, 1e3).weights.device.type == "cpu"


@pytest.mark.parametrize(
    ("functions", "tolerance", "condition", "message"),
    [
        ((), 1e-6, 1e5, "name at least one"),
        ((SpectralFunction(0.0),), 1e-6, 1e5, "power must be positive"),
        ((SpectralFunction(5.0),), 1e-6, 1e5, "at most 3"),
        (RANK, 1e-12, 1e5, "tolerance=1e-12: must be between"),
        (RANK, 1e-6, 1e9, "condition=.*must be between 10 and 1e"),
        (RANK, 1e-6, 1.0, "condition=1.0: must be between"),
        ((SpectralFunction(3.0),), 1e-9, 1e6, "64 nodes do not reach it"),
    ],
)
def test_impossible_fit_is_refused(functions, tolerance, condition, message):
    with pytest.raises(ValueError, match=message):
        node_set(functions, tolerance, condition)
