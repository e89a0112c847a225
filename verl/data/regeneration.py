"""Prompts that are sampled again, edited, once their responses are judged: ``rollout.regenerate``.

Legend: G prompts, n responses to each.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verl.config.errors import ConfigError
from verl.config.ppo import PPOConfig
from verl.data.prompt_rows import PromptRecord, render
from verl.data.prompts import PromptCollator, TokenizedPrompts
from verl.data.records import read_chat
from verl.data.templates import opens_thought
from verl.utils.own import OwnObject

Prompt = str | list[dict[str, Any]]
"""The content of the last message of the prompt in the data set, in place of its own; or a whole chat."""


@dataclass(frozen=True)
class Round:
    """What a class of ``rollout.regenerate`` decides by."""

    number: int
    """1 after the responses to the prompts of the data set, 2 after those to the prompts edited once, and so on."""
    max_rounds: int
    """``rollout.regenerate_rounds``: the last number that is asked about."""
    step: int
    """From 1."""
    total_steps: int
    originals: Sequence[PromptRecord]
    """G, the prompts as the data set has them."""
    records: Sequence[PromptRecord]
    """G, the prompts as they were sampled last; their ground truth is that of the data set."""
    scores: Tensor
    """[G, n] float32, of the verifiers, of the last responses to each."""
    correct: Tensor
    """[G, n] bool."""
    texts: Sequence[Sequence[str]]
    """G, the n responses to each as verifiers read them."""
    max_prompt_length: int
    """The most tokens of an edited prompt, ``data.max_prompt_length``."""
    num_tokens: Callable[[int, Prompt], int]
    """The tokens that prompt g would have in ``data.template`` if it were edited so."""


class Regenerator:
    """A user's class that edits prompts, with checks.

    Raises:
        ConfigError: it cannot be loaded or made, or lacks the method ``regenerate``.
    """

    def __init__(self, config: PPOConfig, tokenizer: PreTrainedTokenizerBase, total_steps: int) -> None:
        rollout = config.rollout
        assert rollout.regenerate is not None, "made only where a class is named"
        methods = {"regenerate": 1, "update?": 1}
        self.own = OwnObject(rollout.regenerate, "rollout.regenerate", rollout.regenerate_kwargs, methods)
        self.max_rounds = rollout.regenerate_rounds
        self.total_steps = total_steps
        self.data = config.data
        self.tokenizer = tokenizer
        self.collate = PromptCollator(config.data.max_prompt_length, int(tokenizer.pad_token_id))

    def edit(
        self,
        number: int,
        step: int,
        originals: Sequence[PromptRecord],
        records: Sequence[PromptRecord],
        judged: tuple[Tensor, Tensor, Sequence[Sequence[str]]],
    ) -> tuple[list[int], TokenizedPrompts | None]:
        """The places of the prompts to sample again, in ascending order, and these as they are edited; None for none.

        Args:
            judged: ``scores``, ``correct`` and ``texts`` of :class:`Round`.

        Raises:
            ConfigError: the class raised, or did not return prompts by place, or one is longer than
                ``data.max_prompt_length``.
        """

        def num_tokens(place: int, prompt: Prompt) -> int:
            return len(self._edited(originals[place], prompt).input_ids)

        found = self.own.call(
            "regenerate",
            Round(
                number,
                self.max_rounds,
                step,
                self.total_steps,
                tuple(originals),
                tuple(records),
                *judged,
                self.data.max_prompt_length,
                num_tokens,
            ),
        )
        places = range(len(records))
        if not isinstance(found, Mapping) or not all(type(g) is int and g in places for g in found):
            raise ConfigError(
                f"{self.own.where}: its regenerate returned {str(found):.80}; it must return a mapping from places of "
                f"round.records, 0 to {len(records) - 1}, to prompts; an empty one to sample none again"
            )
        edited = [self._checked(originals[g], found[g]) for g in sorted(found)]
        return sorted(found), self.collate(edited) if edited else None

    def _checked(self, original: PromptRecord, prompt: Prompt) -> PromptRecord:
        edited, limit = self._edited(original, prompt), self.data.max_prompt_length
        if len(edited.input_ids) > limit:
            raise ConfigError(
                f"data.max_prompt_length={limit}: {self.own.where} edited prompt {original.uid} to "
                f"{len(edited.input_ids)} tokens; raise it, or shorten what is added (round.num_tokens counts)"
            )
        return edited

    def _edited(self, original: PromptRecord, prompt: Prompt) -> PromptRecord:
        where = f"{self.own.where}: its prompt for {original.uid}"
        if isinstance(prompt, str):
            prompt = [*original.messages[:-1], original.messages[-1] | {"content": prompt}]
        try:
            messages = read_chat(prompt, where, "messages", "rollout.regenerate")
        except ConfigError as error:
            must = "must be text, or a list of messages with role and content, and not empty"
            raise ConfigError(f"{where} is {str(prompt):.80}; it {must}") from error
        try:
            ids = render(messages, self.data, self.tokenizer)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        opens = opens_thought(ids, self.tokenizer)
        return replace(original, input_ids=ids, messages=messages, opens_thought=opens)
