"""Training metrics of rollouts, time, speed and memory, and profiler traces."""
