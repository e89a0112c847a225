"""Rollout engines, their requests, and conversations with environments."""
