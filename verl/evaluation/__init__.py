"""Evaluates models on benchmarks: samples and scores responses, computes statistics, and writes a report.

Import order within the package: store, benchmarks <- targets <- tasks <- generation, scoring;
results <- statistics <- report; evaluate imports all of them.
"""
