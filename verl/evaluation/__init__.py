"""Evaluation: from samples and verdicts to tables, curves and a page to read them in."""
