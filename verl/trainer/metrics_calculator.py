"""Alias for ``verl.rank.calculator`` at its path in the paper's release."""

from verl.rank.calculator import RepresentationMetricsCalculator

__all__ = ["RepresentationMetricsCalculator"]
