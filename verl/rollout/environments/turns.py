"""Conversations as an engine keeps them between turns: the hidden states of the tokens that it sampled."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verl.batch import POLICY, Batch
from verl.config.calculator import CalculatorConfig
from verl.config.rollout import MultiTurnConfig
from verl.rank.calculator import RepresentationMetricsCalculator
from verl.rank.turns import measure_turns, turn_lengths
from verl.rollout.environments.tool_parser import ToolCallReader


class PartialResponse(NamedTuple):
    """A response that an engine resumes, or may have to cut."""

    response: Batch
    """As it is so far, B = 1."""
    tokens: list[int]
    """Of the response."""
    of_turn: int
    """How many of these, at the end, belong to a turn that has not ended."""
    read: int
    """How many of these, at the end, have hidden states that are computed again."""


def trailing_policy_tokens(source: Tensor) -> int:
    """Return the number of policy tokens after the last environment token of ``source [n]``."""
    written = (source != POLICY).nonzero().flatten()
    return len(source) - (int(written[-1]) + 1 if len(written) else 0)


class Turns:
    """The turns of one engine's conversations. States are on the CPU, None on workers that keep none."""

    def __init__(
        self,
        options: MultiTurnConfig,
        tokenizer: PreTrainedTokenizerBase,
        end_tokens: Sequence[int],
        calculator: CalculatorConfig | None,
        device: str,
    ) -> None:
        """Prepare an engine for conversations.

        Args:
            end_tokens: that end a turn.
            calculator: how the engine measures hidden states; None where it does not.
            device: where states are measured.

        Raises:
            ConfigError: as :class:`ToolCallReader`.
        """
        self.calculator = None if calculator is None else RepresentationMetricsCalculator(calculator)
        self.max_turns, self.device = options.max_assistant_turns, device
        self.reader = ToolCallReader(options.format, tokenizer, end_tokens) if options.has_tools else None
        self._held: dict[str, tuple[list[Tensor | None], list[int]]] = {}
        """Of each conversation the states of what the policy said, and the tokens of each of its turns."""

    def holds(self, request_id: str) -> bool:
        """Return whether the states of its earlier turns are here."""
        return request_id in self._held

    def keep(self, request_id: str, partial: PartialResponse, states: Tensor | None) -> None:
        """Keep the ``states [n, L, D]`` of a turn that has ended, or of all turns if they were read again."""
        if self.calculator is None:
            return
        known, sizes = self._held.get(request_id, ([], []))
        source = torch.zeros(0, dtype=torch.uint8)
        if partial.read:
            source = partial.response.source
            known, sizes = [], turn_lengths(source)
        if states is not None:
            sampled = torch.cat([source == POLICY, torch.ones(len(states) - len(source), dtype=torch.bool)])
            new = len(states) - len(source)
            states = states if sampled.all() else states[sampled]
            sizes = [*sizes[:-1], sizes[-1] + new] if partial.of_turn else [*sizes, new]
        self._held[request_id] = ([*known, states], sizes)

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drop the states of these requests: newer weights will read their tokens again."""
        for request_id in request_ids:
            self._held.pop(request_id, None)

    def calls(self, tokens: list[int]) -> dict[str, Any]:
        """Return the tool ``calls`` in a turn's tokens, (name, arguments) each, and whether one is ``malformed``."""
        return {"calls": [], "malformed": False} if self.reader is None else self.reader.read(tokens)

    def measured(self) -> Batch | None:
        """Return the rank metrics of the states held, by ``request``, and drop the states."""
        held, self._held = self._held, {}
        requests = sorted(map(int, held))
        parts = [held[str(request)] for request in requests]
        found = [[part for part in states if part is not None] for states, _ in parts]
        if self.calculator is None or not found or not found[0]:
            return None
        whole = [torch.cat(states).to(self.device) for states in found]
        measured = measure_turns(self.calculator, whole, [sizes for _, sizes in parts], self.max_turns)
        return measured.fill(request=torch.tensor(requests))
