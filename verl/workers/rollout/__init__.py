"""Engines that sample responses inside a worker."""
