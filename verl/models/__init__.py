"""Transformer models: configuration, loading, sharding, forward passes, training, and export."""
