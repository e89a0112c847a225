"""Reinforcement-learning algorithms as pure functions on tensors: one method, one function, one dict entry.

Shapes throughout: B responses, R padded response tokens.
"""
