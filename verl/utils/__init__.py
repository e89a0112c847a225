"""Helpers that every package may use: atomic file writes, JSON state, and joining ``torch.distributed``."""
