"""Helpers for all packages, such as atomic file writes, JSON state and ``torch.distributed`` setup."""
