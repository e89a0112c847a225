"""Benchmarks by name: a registry of published ones, and a loader for those and for users' own files."""

from verl.evaluation.benchmarks.loader import load_benchmark
from verl.evaluation.benchmarks.registry import BENCHMARKS, Benchmark
from verl.evaluation.benchmarks.rows import Problem

__all__ = ["BENCHMARKS", "Benchmark", "Problem", "load_benchmark"]
