"""Training: the loops, their entry points, validation, and what is logged."""
