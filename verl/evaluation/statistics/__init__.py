"""Statistics of an evaluation: bootstrap intervals, responses, and the summary of all."""
