"""Rank metrics of hidden states, their dynamics, and rank shaping of advantages (arXiv 2509.23808)."""
