"""Training loops, their entry points, validation, and logging."""
