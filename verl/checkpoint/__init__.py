"""Checkpoints: written by all workers, either complete or absent, and used for resuming and exporting."""
