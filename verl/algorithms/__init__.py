"""Reinforcement-learning algorithms as pure functions on tensors: one method, one file, one dict entry.

Shapes throughout: B responses, R padded response tokens.
"""
