"""Evaluation: samples of models on benchmarks, their verdicts, and tables, curves and a page to read them in.

Imports inside point one way: store, benchmarks, failures <- targets <- tasks <- generation, scoring;
results <- statistics <- report; evaluate on top.
"""
