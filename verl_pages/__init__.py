"""Builds HTML pages from the output of training runs, evaluations and analyses."""

PAGE = "report.html"
"""File name of the page in a training run's folder."""
