"""The method of the paper: rank metrics of hidden states, their dynamics, and how they shape the advantage."""
