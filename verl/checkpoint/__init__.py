"""Checkpoints: written by all workers, complete or absent, resumed from and exported."""
