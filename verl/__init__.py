"""VERL: reinforcement learning with verifiable rewards, shaped by the effective rank of hidden states."""

__version__ = "0.1.0"
