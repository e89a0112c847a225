"""Reinforcement-learning algorithms as pure functions on tensors.

Each algorithm is a function registered by name. B is the number of responses, R the padded response length.
"""
