"""Changes of a training step: subclasses of :class:`Method`, named by ``trainer.method``."""

from verl.method.method import Method, StepOutcome
from verl.method.replay import ReplayBuffer

__all__ = ["Method", "ReplayBuffer", "StepOutcome"]
