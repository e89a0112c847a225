"""Statistics of an evaluation: pass@k, majority votes, intervals, and the rows that summarise them."""
