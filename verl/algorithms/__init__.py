"""Reinforcement-learning algorithms as pure functions on tensors.

Each method is one function and one dictionary entry. Shapes: B responses, R padded response tokens.
"""
