"""Benchmarks: where they come from, and how their rows become problems."""

from verl.evaluation.benchmarks.loader import BENCHMARKS, load_benchmark
from verl.evaluation.benchmarks.rows import Benchmark, Problem

__all__ = ["BENCHMARKS", "Benchmark", "Problem", "load_benchmark"]
