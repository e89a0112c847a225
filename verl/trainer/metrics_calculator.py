"""The rank metrics, where readers of the paper's release look for them; they live in ``verl.rank.calculator``."""

from verl.rank.calculator import RepresentationMetricsCalculator

__all__ = ["RepresentationMetricsCalculator"]
