"""Reinforcement-learning algorithms as pure functions on tensors.

Each method consists of one function and one dictionary entry. Shapes: B responses, R padded response tokens.
"""
