"""A user's own classes around sampling, made before Ray starts and again with every attempt, and their state."""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from verl.config.ppo import PPOConfig
from verl.data.prompt_rows import PromptRecord
from verl.data.prompts import TokenizedPrompts
from verl.data.regeneration import Regenerator
from verl.data.samplers import StepOutcome
from verl.data.schedule import SamplingRequest
from verl.data.selectors import PromptSelector
from verl.rollout.requests import ResponseSettings
from verl.rollout.schedule import SamplingSchedule
from verl.trainer.ppo.recompose import Recomposer
from verl.utils.own import Own


class SamplingHooks:
    """The classes that the options name; without any, nothing is done and nothing is saved.

    Raises:
        ConfigError: one cannot be loaded or made, or does not have the methods it needs.
    """

    def __init__(
        self,
        config: PPOConfig,
        total_steps: int,
        originals: Sequence[PromptRecord],
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        """``originals``: the data set's prompts, by ``uid``."""
        data, algorithm = config.data, config.algorithm
        self.selector = None if data.selector is None else PromptSelector(data, total_steps)
        self.schedule = None if config.rollout.schedule is None else SamplingSchedule(config.rollout)
        self.total_steps = total_steps
        self.config = config
        self.regenerator = None if config.rollout.regenerate is None else Regenerator(config, tokenizer, total_steps)
        self.recomposer = None if algorithm.recompose is None else Recomposer(config, total_steps, originals)

    def choose(self, prompts: TokenizedPrompts, step: int) -> TokenizedPrompts:
        """The prompts to sample responses to."""
        return prompts if self.selector is None else self.selector.choose(prompts, step)

    def settings(self, prompts: TokenizedPrompts, step: int) -> ResponseSettings | None:
        """How the responses to these prompts are sampled; None: as the options say."""
        if self.schedule is None:
            return None
        rollout, length = self.config.rollout, self.config.data.max_response_length
        records, base = tuple(prompts.records), rollout.train_kwargs
        return self.schedule.settings(SamplingRequest(step, self.total_steps, records, rollout.n, base, length))

    @property
    def _own(self) -> dict[str, Own]:
        """Those whose state is all theirs, and that may be told how steps went."""
        parts = {
            "selector": self.selector,
            "regenerate": self.regenerator,
            "recompose": self.recomposer,
            "schedule": self.schedule,
        }
        return {name: part.own for name, part in parts.items() if part is not None}

    @property
    def notes(self) -> list[str]:
        """What the user should know of them."""
        return [own.note for own in self._own.values() if own.note]

    @property
    def listens(self) -> bool:
        """Whether one is told how steps went."""
        return any(own.has("update") for own in self._own.values())

    def update(self, outcome: StepOutcome) -> None:
        """Tell those that listen how a step went."""
        for own in self._own.values():
            if own.has("update"):
                own.call("update", outcome)

    def state(self) -> dict[str, Any]:
        """What checkpoints hold, as JSON."""
        state = {name: own.state() for name, own in self._own.items()}
        return state if self.recomposer is None else state | {"buffer": self.recomposer.buffer_state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state`. Raises ``ConfigError`` for the state of other classes."""
        for name, own in self._own.items():
            own.load_state(state.get(name))
        if self.recomposer is not None:
            self.recomposer.load_buffer(state.get("buffer"))
