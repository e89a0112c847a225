"""Alias for ``verl.rank.dynamics`` at its path in the paper's release."""

from verl.rank.dynamics import acceleration, base_metrics, curvature, prefix_counts, prefix_rows, velocity

__all__ = ["acceleration", "base_metrics", "curvature", "prefix_counts", "prefix_rows", "velocity"]
