"""Training metrics for rollouts, timing, speed and memory, and profiler traces."""
