"""Choosing a step's prompts among candidates just before they are sampled: ``data.selector``."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from verl.config.data import DataConfig
from verl.config.errors import ConfigError
from verl.data.prompt_rows import PromptRecord
from verl.data.prompts import TokenizedPrompts
from verl.utils.own import OwnObject


@dataclass(frozen=True)
class Candidates:
    """What a selector chooses from."""

    step: int
    """The step whose prompts are chosen, from 1."""
    total_steps: int
    records: Sequence[PromptRecord]
    """C = k m prompts, k being ``data.selector_candidates``, in the order of ``data.sampler`` or ``data.shuffle``."""
    num_chosen: int
    """m, the prompts to choose."""


class PromptSelector:
    """A user's selector, with checks.

    Raises:
        ConfigError: it cannot be loaded or made, or lacks the method ``select``.
    """

    def __init__(self, config: DataConfig, total_steps: int) -> None:
        assert config.selector is not None, "made only where a class is named"
        self.own = OwnObject(config.selector, "data.selector", config.selector_kwargs, {"select": 1, "update?": 1})
        self.total_steps = total_steps
        self.num_chosen = config.prompts_per_batch

    def choose(self, prompts: TokenizedPrompts, step: int) -> TokenizedPrompts:
        """The chosen ones among ``prompts``, in the order in which the selector names them.

        Raises:
            ConfigError: it raised, or did not name ``num_chosen`` different places.
        """
        candidates = Candidates(step, self.total_steps, tuple(prompts.records), self.num_chosen)
        places = self._checked(self.own.call("select", candidates), len(candidates.records))
        return TokenizedPrompts([prompts.records[i] for i in places], prompts.tokens[torch.tensor(places)])

    def _checked(self, chosen: Any, num: int) -> list[int]:
        try:
            places = [operator.index(place) for place in chosen]
        except TypeError:
            places = []
        if len(set(places)) != self.num_chosen or len(places) != len(set(places)) or not set(places) <= set(range(num)):
            raise ConfigError(
                f"{self.own.where}: its select returned {str(chosen):.80}; it must return {self.num_chosen} different "
                f"places of candidates.records, 0 to {num - 1}"
            )
        return places
