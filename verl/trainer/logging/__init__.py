"""Computes training metrics of rollouts, time, speed and memory, and records profiler traces."""
