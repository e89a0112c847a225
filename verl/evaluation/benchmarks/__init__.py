"""Loading of benchmarks from files or the hub, and conversion of their rows to problems."""

from verl.evaluation.benchmarks.loader import BENCHMARKS, load_benchmark, load_prompts
from verl.evaluation.benchmarks.rows import Benchmark, Problem

__all__ = ["BENCHMARKS", "Benchmark", "Problem", "load_benchmark", "load_prompts"]
