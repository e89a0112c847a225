"""Evaluation of models on benchmarks: sampling, scoring, statistics, and a report with tables and curves.

Import order within the package: store, benchmarks, failures <- targets <- tasks <- generation, scoring;
results <- statistics <- report; evaluate imports all of them.
"""
