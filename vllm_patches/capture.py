"""Collects, step by step, the rows that vLLM samples tokens from, and hands them out per request.

vLLM gives a model's ``compute_logits`` exactly one row per running request: the hidden state, after the final norm,
from which that request's next token is sampled. Row j of a finished request is therefore the state that its token j
was sampled from, however the scheduler batched, chunked, preempted or recomputed it.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class CaptureOptions:
    """``additional_config["hidden_states"]``, parsed."""

    layers: tuple[int, ...] = (-1,)
    """Captured layers; -1 is the state after the final norm."""

    @classmethod
    def parse(cls, raw: Any) -> "CaptureOptions":
        """Read the user's mapping.

        Raises:
            ValueError: for an option or a layer that is not supported, naming those that are.
        """
        if not isinstance(raw, dict):
            raise ValueError(
                f"additional_config['hidden_states']={raw!r}: must be a mapping such as {{'layers': [-1]}}"
            )
        unknown = set(raw) - {"layers"}
        if unknown:
            raise ValueError(
                f"additional_config['hidden_states'] has unknown options {sorted(unknown)}; known: ['layers']"
            )
        layers = raw.get("layers", [-1])
        if layers not in ([-1], (-1,)):
            raise ValueError(
                f"additional_config['hidden_states']['layers']={layers}: only the state after the final norm, "
                "[-1], can be captured"
            )
        return cls(tuple(layers))


class HiddenStateCapture:
    """The states of every running request of one engine; rows stay on the device that computed them."""

    def __init__(self, options: CaptureOptions) -> None:
        self.options = options
        self._rows: dict[str, list[Tensor]] = defaultdict(list)

    def record(self, states: Tensor, request_ids: Sequence[str], discarded: Sequence[bool]) -> None:
        """Keep one engine step.

        Args:
            states: [num_requests, hidden], one row per running request, in the order of ``request_ids``.
            request_ids: vLLM's internal request ids.
            discarded: true where the row's token is thrown away because its prompt is not yet computed to the end.
        """
        # The engine reuses its buffers in the next step; one copy per step is cheaper than one per request.
        kept = states.detach().clone()
        for row, request_id, is_discarded in zip(kept, request_ids, discarded, strict=True):
            if not is_discarded:
                self._rows[request_id].append(row)

    def pop(self, request_id: str, num_tokens: int) -> Tensor:
        """Hand out a finished request's states, [num_tokens, num_layers, hidden], and forget the request.

        Asynchronous scheduling may compute one step more than the request needed; that row is dropped.

        Raises:
            RuntimeError: if fewer rows were seen than tokens sampled, which would mean misaligned states.
        """
        rows = self._rows.pop(request_id, [])
        if len(rows) < num_tokens:
            raise RuntimeError(
                f"request {request_id}: captured {len(rows)} hidden states for {num_tokens} tokens; "
                "this engine configuration is not supported by the hidden-state capture"
            )
        if num_tokens == 0:
            return torch.empty(0, len(self.options.layers), 0)
        return torch.stack(rows[:num_tokens]).unsqueeze(1)

    def __contains__(self, request_id: str) -> bool:
        """Whether rows of this request are held."""
        return request_id in self._rows

    def __len__(self) -> int:
        """Number of requests whose rows are held."""
        return len(self._rows)
