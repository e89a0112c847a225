"""A user's own classes around sampling, made before Ray starts and again with every attempt, and their state."""

from collections.abc import Mapping
from typing import Any

from verl.config.ppo import PPOConfig
from verl.data.prompts import TokenizedPrompts
from verl.data.samplers import StepOutcome
from verl.data.selectors import PromptSelector


class SamplingHooks:
    """The classes that the options name; without any, nothing is done and nothing is saved.

    Raises:
        ConfigError: one cannot be loaded or made, or does not have the methods it needs.
    """

    def __init__(self, config: PPOConfig, total_steps: int) -> None:
        self.selector = None if config.data.selector is None else PromptSelector(config.data, total_steps)

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
        return {} if self.selector is None else {"selector": self.selector.own.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state`."""
        if self.selector is not None:
            self.selector.own.load_state(state.get("selector"))
