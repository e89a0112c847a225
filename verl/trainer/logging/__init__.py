"""Training metrics for rollouts, timing, throughput and memory, and profiler traces."""
