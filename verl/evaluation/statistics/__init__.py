"""Statistics of an evaluation: pass@k, majority votes, bootstrap intervals, responses, and the summary of all."""
