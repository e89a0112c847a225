"""Alias of ``verl.rank.calculator`` under its path in the paper's release."""

from verl.rank.calculator import RepresentationMetricsCalculator

__all__ = ["RepresentationMetricsCalculator"]
