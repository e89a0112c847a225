"""The gradients of one update. Imports nothing of verl that takes long."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from verl.models.learner import Learner


def gradients_of(learner: Learner, update: Callable[[], Any]) -> tuple[Any, dict[str, Tensor]]:
    """What ``update`` returns, and the full gradients of its optimizer step, which is not applied."""
    gradients: dict[str, Tensor] = {}

    def keep() -> None:
        named = learner.model.named_parameters()
        gradients.update((name, p.grad.full_tensor()) for name, p in named if p.requires_grad)

    apply, learner.optimizer.step = learner.optimizer.step, keep  # type: ignore[method-assign]
    returned = update()
    learner.optimizer.step = apply  # type: ignore[method-assign]
    return returned, gradients
