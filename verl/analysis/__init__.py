"""The paper's analysis: what exploration and exploitation look like in tokens and in hidden states.

Imports inside point one way: responses, tokens, similarity <- sheets <- drawing <- figures; correlations; page; analyse
on top.
"""
