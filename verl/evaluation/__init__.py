"""Evaluation: samples of models on benchmarks, their verdicts, and tables, curves and a page to read them in.

Imports inside point one way: results, json_lines <- store; benchmarks, targets <- tasks <- generation, scoring;
results <- statistics <- report; evaluate on top.
"""
