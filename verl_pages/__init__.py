"""Builds HTML pages from the outputs of training runs, evaluations and analyses."""

PAGE = "report.html"
"""Default file name of a training run's page, in the run's folder."""
