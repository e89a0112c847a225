"""Velocity, acceleration and their relatives, where readers of the paper's release look; see ``verl.rank.dynamics``."""

from verl.rank.dynamics import acceleration, base_metrics, curvature, prefix_counts, prefix_rows, velocity

__all__ = ["acceleration", "base_metrics", "curvature", "prefix_counts", "prefix_rows", "velocity"]
