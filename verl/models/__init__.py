"""One transformer: its facts, loading, sharding, forward passes, training and export."""
