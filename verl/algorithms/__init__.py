"""Reinforcement-learning algorithms as pure functions on tensors.

Each method is one function and one dict entry. Shapes: B responses, R padded response tokens.
"""
