"""What training logs: figures of rollouts, time, speed and memory, and profiler traces."""
