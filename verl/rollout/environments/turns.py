"""Stores the hidden states of sampled tokens between the turns of an engine's conversations."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verl.batch import POLICY, Batch
from verl.config.calculator import CalculatorConfig
from verl.config.errors import ConfigError
from verl.config.rollout import MultiTurnConfig
from verl.rank.calculator import RepresentationMetricsCalculator
from verl.rank.turns import measure_turns
from verl.rollout.environments.tool_parser import ToolCallReader
from verl.rollout.environments.tools import tool_schemas
from verl.rollout.partial import PartialResponse


class Turns:
    """Turns of an engine's conversations. Hidden states are stored on the CPU, or None on workers that lack them."""

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
            end_tokens: Tokens that end a turn.
            calculator: Options for measuring hidden states, or None if the engine does not measure them.
            device: Device on which states are measured.

        Raises:
            ConfigError: See :class:`ToolCallReader` and :func:`tool_schemas`.
        """
        self.calculator = None if calculator is None else RepresentationMetricsCalculator(calculator)
        self.max_turns, self.device = options.max_assistant_turns, device
        self.reader, self.unsupported = None, ""
        try:
            if options.has_tools or any(tool_schemas(options, name) for name in options.environments):
                self.reader = ToolCallReader(options.format, tokenizer, end_tokens)
        except ConfigError as error:
            if not options.agent.enabled:
                raise
            self.unsupported = str(error)  # raised if an agent brings tools
        self._held: dict[str, tuple[list[Tensor | None], list[int]]] = {}
        """Hidden states of each conversation's policy tokens, and the number of policy tokens in each turn."""

    def holds(self, request_id: str) -> bool:
        """Return whether the hidden states of a conversation's earlier turns are available."""
        return request_id in self._held

    def keep(self, request_id: str, before: PartialResponse, num_read: int, states: Tensor | None) -> None:
        """Store the ``states [n, L, D]`` of a finished turn, or of all turns if their tokens were recomputed.

        Args:
            before: Response without the tokens sampled by this request.
            num_read: Number of tokens in ``before`` whose states were recomputed.
        """
        if self.calculator is None:
            return
        known, sizes = self._held.get(request_id, ([], []))
        source = torch.tensor(before.source if num_read else [], dtype=torch.uint8)
        if num_read:
            known, sizes = [], [len(tokens) for by, tokens in before.parts() if by == POLICY]
        if states is not None:
            sampled = torch.cat([source == POLICY, torch.ones(len(states) - len(source), dtype=torch.bool)])
            new = len(states) - len(source)
            states = states if sampled.all() else states[sampled]
            sizes = [*sizes[:-1], sizes[-1] + new] if before.open_tokens else [*sizes, new]
        self._held[request_id] = ([*known, states], sizes)

    def forget(self, request_ids: Sequence[str]) -> None:
        """Drop the states of these requests, because they will be recomputed with newer weights."""
        for request_id in request_ids:
            self._held.pop(request_id, None)

    def calls(self, tokens: list[int]) -> dict[str, Any]:
        """Return a turn's tool calls, the marker that starts a call, and the reason if tool calls are unsupported."""
        if self.reader is None:
            return {"calls": [], "malformed": False, "mark": None, "unsupported": self.unsupported}
        return self.reader.read(tokens) | {"mark": self.reader.mark, "unsupported": ""}

    def take_rank_metrics(self) -> Batch | None:
        """Return the rank metrics of the stored hidden states, with their ``request``, and discard the states."""
        held, self._held = self._held, {}
        requests = sorted(map(int, held))
        parts = [held[str(request)] for request in requests]
        kept = [[part for part in states if part is not None] for states, _ in parts]
        if self.calculator is None or not kept or not kept[0]:
            return None
        whole = [torch.cat(states).to(self.device) for states in kept]
        measured = measure_turns(self.calculator, whole, [sizes for _, sizes in parts], self.max_turns)
        return measured.fill(request=torch.tensor(requests))
