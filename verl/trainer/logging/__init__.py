"""Logging of training: figures of rollouts, time, speed and memory, and profiler traces."""
