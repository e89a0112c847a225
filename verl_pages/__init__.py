"""Pages that people read in a browser, made of what training runs, evaluations and analyses leave."""

PAGE = "report.html"
"""The page in a training run's folder."""
