"""An order of prompts that is that of the file, and that lets each step of a training wait for its turn."""

from collections.abc import Iterator
from typing import Any

from turns import wait_for_turn


class TurnSampler:
    """See ``data.sampler`` in TRAINING_CONFIG.md."""

    def __init__(self, dataset: Any, config: Any, seed: int) -> None:
        self.num_prompts = len(dataset)

    def __len__(self) -> int:
        return self.num_prompts

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.num_prompts))

    def update(self, outcome: Any) -> None:
        """A step has ended but for its weights' way to the engines, which is part of the next one's time."""
        wait_for_turn()
