"""Benchmarks by name: the registry of published ones, and the loader of those and of users' own."""

from verl.evaluation.benchmarks.loader import load_benchmark
from verl.evaluation.benchmarks.registry import BENCHMARKS, Benchmark
from verl.evaluation.benchmarks.rows import Problem

__all__ = ["BENCHMARKS", "Benchmark", "Problem", "load_benchmark"]
