"""The paper's analysis: what exploration and exploitation look like in tokens and in hidden states.

Imports inside point one way: metrics <- sheets <- figures; correlations; publish; analyse on top.
"""
