"""Benchmarks by name: the registry of published ones, and the loader of those and of users' own."""

from verl.data.benchmarks.loader import load_benchmark
from verl.data.benchmarks.registry import BENCHMARKS, Benchmark
from verl.data.benchmarks.rows import Problem

__all__ = ["BENCHMARKS", "Benchmark", "Problem", "load_benchmark"]
