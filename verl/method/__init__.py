"""Customization of the training step with subclasses of :class:`Method`, selected by ``trainer.method``."""

from verl.method.method import Method, StepOutcome
from verl.method.replay import ReplayBuffer

__all__ = ["Method", "ReplayBuffer", "StepOutcome"]
