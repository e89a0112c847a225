"""A user's own classes around sampling, made before Ray starts and again with every attempt, and their state."""

from collections.abc import Mapping, Sequence
from typing import Any

from verl.config.ppo import PPOConfig
from verl.data.prompt_rows import PromptRecord
from verl.data.prompts import TokenizedPrompts
from verl.data.samplers import StepOutcome
from verl.data.selectors import PromptSelector
from verl.trainer.ppo.recompose import Recomposer


class SamplingHooks:
    """The classes that the options name; without any, nothing is done and nothing is saved.

    Raises:
        ConfigError: one cannot be loaded or made, or does not have the methods it needs.
    """

    def __init__(self, config: PPOConfig, total_steps: int, originals: Sequence[PromptRecord] = ()) -> None:
        """``originals``: the data set's prompts, by ``uid``."""
        data, algorithm = config.data, config.algorithm
        self.selector = None if data.selector is None else PromptSelector(data, total_steps)
        self.recomposer = None if algorithm.recompose is None else Recomposer(config, total_steps, originals)

    def choose(self, prompts: TokenizedPrompts, step: int) -> TokenizedPrompts:
        """The prompts to sample responses to."""
        return prompts if self.selector is None else self.selector.choose(prompts, step)

    @property
    def listens(self) -> bool:
        """Whether one is told how steps went."""
        return self.selector is not None

    def update(self, outcome: StepOutcome) -> None:
        """Tell those that listen how a step went."""
        if self.selector is not None:
            self.selector.update(outcome)

    def state(self) -> dict[str, Any]:
        """What checkpoints hold, as JSON."""
        state = {} if self.selector is None else {"selector": self.selector.own.state()}
        return state if self.recomposer is None else state | {"recompose": self.recomposer.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state`."""
        if self.selector is not None:
            self.selector.own.load_state(state.get("selector"))
        if self.recomposer is not None:
            self.recomposer.load_state(state.get("recompose"))
