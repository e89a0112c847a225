"""Evaluation of models on benchmarks, from sampling and scoring responses to statistics and a report.

Import order within the package: store, benchmarks <- targets <- tasks <- generation, scoring;
results <- statistics <- report; evaluate imports all of them.
"""
