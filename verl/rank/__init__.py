"""Implements the paper's method: rank metrics of hidden states, their dynamics, and rank shaping of advantages."""
