"""Helpers for all packages: atomic file writes, JSON state, joining ``torch.distributed`` and others."""
