"""Contains helpers for all packages, such as atomic file writes, JSON state and joining ``torch.distributed``."""
