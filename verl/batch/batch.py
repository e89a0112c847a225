"""Batch of episodes that a training step passes from the engine to the loss and the checkpoint.

An episode is a prompt and its response, which consists of tokens sampled by the policy and, in a conversation, tokens
written by an environment. Each stage of a training step fills some of the columns. Columns are flat, so no padding is
sent between processes. Code that needs padded tensors calls :meth:`Batch.padded` or :meth:`Batch.rows`.

Columns may be on a GPU, but lengths stay on the CPU. Masks and indices are computed on the host and then copied, so
reading a size never waits for the GPU.

Shapes use B for episodes, N for tokens, M for response tokens (all tokens after the prompts), P and R for padded prompt
and response lengths, L for captured layers, and D for the hidden size.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from verl.batch.columns import (
    EPISODE,
    KINDS,
    POLICY,
    PREFIX,
    RANK,
    RESPONSE_TOKEN,
    TOKEN,
    TOP_K,
    TURN_RANK,
    Columns,
    declared_kind,
)
from verl.batch.flat import concat, positions_within, spans, sums_within, take
from verl.batch.serialization import Packed
from verl.utils.device import to_device, to_host


class Batch(Columns):
    """Batch of B episodes with the columns declared in :class:`Columns`.

    ``batch[rows]`` selects episodes, and ``name in batch`` tests whether a column is filled.

    Example: an episode with two turns and a calculator, and an episode with one turn (B = 2, N = 14, M = 9)::

        prompt    response                          prompt_lengths    [3, 2]
        P P P     A A E E A A                       response_lengths  [6, 3]
        P P       A A A
        tokens    P P P A A E E A A P P A A A       [N]
        source          0 0 1 1 0 0     0 0 0       [M], 1 where the environment wrote the token
        learn_mask      1 1 0 0 1 1     1 1 1       [M]
        scores          0.0             1.0         [B]
        padded("advantages")                        [B, R], R = 6, zeros after the third token of the second row
    """

    def __init__(
        self, prompt_lengths: Tensor, response_lengths: Tensor, width: int | None = None, **columns: Any
    ) -> None:
        """Create a batch of episodes with the given lengths.

        Args:
            prompt_lengths, response_lengths: Lengths in tokens, [B] int64 on the CPU.
            width: Padded response length R, at least the length of the longest response, which is the default.
            columns: Columns to pass to :meth:`fill`.
        """
        self.prompt_lengths = prompt_lengths
        self.response_lengths = response_lengths
        self.width = self.longest_response if width is None else width
        self.device = torch.device("cpu")
        """Device of the columns and masks (see :meth:`to`)."""
        self._copied: dict[str, Tensor] = {}
        self._columns: dict[str, Any] = {}
        self._kinds: dict[str, str] = {}
        self.fill(**columns)

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], **columns: Any) -> Self:
        """Create a batch from token ids. ``columns`` are passed to :meth:`fill`."""
        pairs = zip(prompts, responses, strict=True)
        tokens = torch.tensor([t for prompt, response in pairs for part in (prompt, response) for t in part])
        prompt_lengths, response_lengths = (
            torch.tensor([len(part) for part in parts]) for parts in (prompts, responses)
        )
        return cls(prompt_lengths.long(), response_lengths.long(), tokens=tokens.long(), **columns)

    # --- Shape ---

    def __len__(self) -> int:
        return len(self.response_lengths)

    @property
    def lengths(self) -> Tensor:
        """Number of tokens in each episode, [B] int64."""
        return self.prompt_lengths + self.response_lengths

    @property
    def longest_response(self) -> int:
        """Number of tokens in the longest response."""
        return int(self.response_lengths.max()) if len(self) else 0

    @property
    def mask(self) -> Tensor:
        """Mask of response tokens, [B, R] bool."""
        return self._on_device("mask", lambda: torch.arange(self.width) < self.response_lengths[:, None])

    @property
    def policy_mask(self) -> Tensor:
        """Mask of the response tokens that the policy sampled, [B, R] bool."""
        return self.pad(self.by_policy, False) if "source" in self else self.mask

    @property
    def by_policy(self) -> Tensor:
        """Whether the policy sampled each response token, [M] bool."""
        if "source" in self:
            return self.source == POLICY
        return torch.ones(self._size(RESPONSE_TOKEN), dtype=torch.bool, device=self.device)

    @property
    def policy_lengths(self) -> Tensor:
        """Number of policy-sampled tokens in each response, [B] int64."""
        return self.policy_mask.sum(dim=1)

    @property
    def learned_responses(self) -> Tensor:
        """Mask of the responses with at least one token in ``learn_mask``, [B] bool on the CPU."""
        return sums_within(self.learn_mask.long().cpu(), self.response_lengths) > 0

    @property
    def in_response(self) -> Tensor:
        """Mask of response tokens among all tokens, [N] bool."""
        return self._on_device("in_response", self._after_prompts)

    @property
    def predictors(self) -> Tensor:
        """Index in ``tokens`` of the token that precedes and predicts each response token, [M] int64."""
        return self._on_device("predictors", lambda: self._after_prompts().nonzero().flatten() - 1)

    @property
    def response_tokens(self) -> Tensor:
        """Token ids of the responses, [M] int64."""
        tokens: Tensor = self.tokens
        return tokens[self._on_device("responses", lambda: self._after_prompts().nonzero().flatten())]

    def _after_prompts(self) -> Tensor:
        lengths = torch.stack([self.prompt_lengths, self.response_lengths], dim=1).flatten()
        return torch.arange(len(lengths)).remainder(2).bool().repeat_interleave(lengths)

    def _padded_indices(self) -> Tensor:
        """Return the index of each response token in a flattened [B, R] tensor, [M] int64."""
        rows, n = torch.arange(len(self)), self.response_lengths
        return self._on_device("padded", lambda: (rows * self.width).repeat_interleave(n) + positions_within(n))

    def _on_device(self, name: str, compute: Callable[[], Tensor]) -> Tensor:
        """Compute a tensor on the host and copy it to the device of the columns. Copies on a GPU are cached."""
        if self.device.type == "cpu":
            return compute()
        if name not in self._copied:
            self._copied[name] = to_device(compute(), self.device)
        return self._copied[name]

    # --- Columns ---

    def fill(self, kind: str | None = None, /, **columns: Any) -> Self:
        """Set columns in place and return the batch. Columns whose value is None are left unchanged.

        Response-token columns may be passed as padded tensors [B, R], whose padding is discarded. Raises ``ValueError``
        if a column has the wrong length, the kind of a custom column is ambiguous, or the batch has an attribute with
        the same name.

        Args:
            kind: Kind of custom columns, ``EPISODE`` or ``RESPONSE_TOKEN``, or None to infer it from their length.
        """
        for name, values in columns.items():
            if values is None:
                continue
            if name in self.__dict__ or hasattr(type(self), name):
                raise ValueError(f"column {name}: a batch has an attribute of this name; rename it")
            known = declared_kind(name) or (EPISODE if isinstance(values, list) else kind)
            padded = isinstance(values, Tensor) and values.shape == (len(self), self.width)
            if padded and known in (RESPONSE_TOKEN, None) and name not in TOP_K and not name.startswith(PREFIX):
                known, values = RESPONSE_TOKEN, self.flat(values)
            self._set(name, values, known or self._inferred_kind(name, values))
        return self

    def _inferred_kind(self, name: str, values: Tensor) -> str:
        """Infer the kind of a custom column from its length."""
        if len(values) == len(self) == self._size(RESPONSE_TOKEN):
            raise ValueError(
                f"column {name}: {len(values)} entries, and the batch has as many episodes as response tokens; "
                f"set its kind: fill({EPISODE!r}, {name}=...) or fill({RESPONSE_TOKEN!r}, {name}=...)"
            )
        return EPISODE if len(values) == len(self) else RESPONSE_TOKEN

    def _set(self, name: str, values: Any, kind: str) -> None:
        if len(values) != self._size(kind):
            shape = tuple(values.shape) if isinstance(values, Tensor) else len(values)
            raise ValueError(f"column {name}: {shape}; expected one entry for each of {self._size(kind)} {kind}s")
        self._columns[name], self._kinds[name] = values, kind

    def columns(self, *names: str) -> Self:
        """Return a batch with only the columns ``names``, ignoring declared columns that are not filled.

        Raises ``ValueError`` if a column in ``names`` is neither filled nor declared.
        """
        for name in names:
            if name not in self._columns and declared_kind(name) is None:
                raise ValueError(self._missing(name))
        chosen = {name: self._columns[name] for name in names if name in self._columns}
        return self._like(self.prompt_lengths, self.response_lengths, chosen)

    @property
    def names(self) -> list[str]:
        """Names of the filled columns."""
        return list(self._columns)

    def kind_of(self, name: str) -> str:
        return self._kinds[name]

    def without(self, *names: str) -> Self:
        """Return a batch without the columns ``names``."""
        return self.columns(*(name for name in self.names if name not in names))

    def merge(self, other: "Batch") -> Self:
        """Add the columns of ``other``, a batch of the same episodes, in place and return this batch."""
        for name, values in other._columns.items():
            self._set(name, values, other._kinds[name])
        return self

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._columns:
            raise AttributeError(self._missing(name))
        return self._columns[name]

    def _missing(self, name: str) -> str:
        if declared_kind(name):
            return f"column {name!r} of the batch is not filled; filled are {', '.join(self.names)}"
        known = sorted({*KINDS, *self._columns})
        guess = "".join(f"; did you mean {close!r}?" for close in get_close_matches(name, known, n=1))
        return f"the batch has no column {name!r}" + (guess or f"; the columns are {', '.join(known)}")

    @property
    def rank_metrics(self) -> dict[str, Tensor]:
        """Rank metrics of each response by name, [B, L], in the calculator's order (empty without captured states)."""
        return self._family(RANK)

    @property
    def turn_metrics(self) -> dict[str, Tensor]:
        """Rank metrics of each of the first K turns by name, [B, K, L] (empty for single-turn responses)."""
        return self._family(TURN_RANK)

    @property
    def prefix_metrics(self) -> dict[str, Tensor]:
        """Rank metrics of the prefix up to each token by name, [M, L] (empty without ``calculator.keep_prefixes``)."""
        return self._family(PREFIX)

    def _family(self, prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): v for name, v in self._columns.items() if name.startswith(prefix)}

    def padded(self, name: str, fill: float = 0.0) -> Tensor:
        """Pad a response-token column to [B, R, ...] with the value ``fill``, or return an episode column unchanged."""
        if name == "response_tokens":
            return self.pad(self.response_tokens, fill)
        values: Tensor = getattr(self, name)
        return self.pad(values, fill) if self._kinds[name] == RESPONSE_TOKEN else values

    def flat(self, values: Tensor) -> Tensor:
        """Remove the padding from ``values [B, R, ...]`` and return [M, ...]. This is the inverse of :meth:`pad`."""
        return values.flatten(0, 1)[to_device(self._padded_indices(), values.device)]

    def pad(self, values: Tensor, fill: float = 0.0) -> Tensor:
        """Pad ``values [M, ...]`` of response tokens to [B, R, ...] with the value ``fill``."""
        rows = values.new_full((len(self) * self.width, *values.shape[1:]), fill)
        rows[to_device(self._padded_indices(), values.device)] = values
        return rows.view(len(self), self.width, *values.shape[1:])

    def rows(self, pad_token_id: int = 0) -> tuple[Tensor, Tensor]:
        """Return token ids and the attention mask, both [B, P + R] int64 on the CPU.

        Prompts are left-padded and responses right-padded, so every response starts at position P.
        """
        longest_prompt = int(self.prompt_lengths.max()) if len(self) else 0
        positions = torch.arange(-longest_prompt, self.width)
        mask = (positions >= -self.prompt_lengths[:, None]) & (positions < self.response_lengths[:, None])
        input_ids = torch.full(mask.shape, pad_token_id, dtype=torch.int64)
        input_ids[mask] = self.tokens
        return input_ids, mask.long()

    # --- Episodes ---

    def __getitem__(self, rows: Tensor | slice | Sequence[int]) -> Self:
        """Return a copy of the episodes selected by ``rows``, which is a slice, indices, or a boolean mask [B]."""
        counts = {TOKEN: self.lengths, RESPONSE_TOKEN: self.response_lengths}
        entries: dict[str, Any]
        index: Any
        if isinstance(rows, slice) and rows.step in (None, 1):
            # Consecutive episodes have consecutive tokens, so slice the columns without building token indices.
            start, stop, _ = rows.indices(len(self))
            index = slice(start, max(start, stop))
            entries = {kind: slice(int(n[:start].sum()), int(n[: index.stop].sum())) for kind, n in counts.items()}
        else:
            index = torch.as_tensor(range(len(self))[rows] if isinstance(rows, slice) else rows)
            if index.dim() != 1:
                raise TypeError(
                    f"batch[{rows}]: not a list, mask or slice of episodes; batch[[i]] has the single one i"
                )
            index = index.nonzero().flatten() if index.dtype == torch.bool else index.long()
            entries = {kind: spans(n, index) for kind, n in counts.items()}
        entries[EPISODE] = index
        chosen = {name: take(values, entries[self._kinds[name]]) for name, values in self._columns.items()}
        return self._like(take(self.prompt_lengths, index), take(self.response_lengths, index), chosen)

    def split(self, num_rows: int) -> Iterator[Self]:
        """Yield consecutive batches of ``num_rows`` episodes. The last batch may be smaller."""
        return (self[start : start + num_rows] for start in range(0, len(self), num_rows))

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """Concatenate batches, dropping declared columns that are missing from any of them.

        Raises ``ValueError`` if ``parts`` is empty or a custom column is missing from some of them.
        """
        if not parts:
            raise ValueError("Batch.join([]): nothing to join")
        names = dict.fromkeys(name for part in parts for name in part.names)
        shared = [name for name in names if all(name in part for part in parts)]
        if lacking := [name for name in names if name not in shared and declared_kind(name) is None]:
            raise ValueError(
                f"Batch.join: some parts lack {', '.join(lacking)}; fill it in all, or leave it out with without()"
            )
        columns = {name: concat([part._columns[name] for part in parts]) for name in shared}
        joined = cls(
            torch.cat([part.prompt_lengths for part in parts]),
            torch.cat([part.response_lengths for part in parts]),
            max(part.width for part in parts),
        )
        joined._columns, joined._kinds = columns, {name: parts[0]._kinds[name] for name in shared}
        joined.device = parts[0].device
        return joined

    def after(self, prompts: Sequence[Sequence[int]]) -> Self:
        """Return the same responses with different prompts and with only the columns ``tokens`` and ``source``."""
        responses = [ids.tolist() for ids in self.response_tokens.split(self.response_lengths.tolist())]
        return type(self).of(prompts, responses, **({"source": self.source} if "source" in self else {}))

    def trimmed(self) -> Self:
        """Return the same episodes with R reduced to the length of the longest response."""
        return self._like(self.prompt_lengths, self.response_lengths, self._columns, self.longest_response)

    def widened(self, width: int) -> Self:
        """Return the same episodes with R set to ``width``, which must be at least the longest response's length."""
        return self._like(self.prompt_lengths, self.response_lengths, self._columns, width)

    def to(self, device: str | torch.device) -> Self:
        """Return a batch with its columns on ``device``. Copying from a GPU synchronizes only once."""
        device, columns = torch.device(device), dict(self._columns)
        tensors = {name: values for name, values in columns.items() if isinstance(values, Tensor)}
        if device.type == "cpu":
            columns |= zip(tensors, to_host(list(tensors.values())), strict=True)
        else:
            columns |= {name: to_device(values, device) for name, values in tensors.items()}
        moved = self._like(self.prompt_lengths, self.response_lengths, columns)
        moved.device = device
        return moved

    def _size(self, kind: str) -> int:
        counted = {TOKEN: self.lengths, RESPONSE_TOKEN: self.response_lengths}
        return int(counted[kind].sum()) if kind in counted else len(self)

    def _like(self, prompts: Tensor, responses: Tensor, columns: Mapping[str, Any], width: int | None = None) -> Self:
        """Return a batch with the given lengths and columns, without validating them."""
        batch = type(self)(prompts, responses, self.width if width is None else width)
        batch._columns = dict(columns)
        batch._kinds = {name: self._kinds[name] for name in columns}
        batch.device = self.device
        return batch

    # --- Pickling ---

    def __getstate__(self) -> dict[str, Any]:
        """Compress the columns to numpy arrays (:class:`Packed`), which Ray can read without copying."""
        token_lengths = {TOKEN: self.lengths.numpy(), RESPONSE_TOKEN: self.response_lengths.numpy()}
        packed = {n: Packed.of(v, token_lengths.get(self._kinds[n])) for n, v in self._columns.items()}
        lengths = (self.prompt_lengths.numpy(), self.response_lengths.numpy())
        return {"lengths": lengths, "width": self.width, "columns": packed, "kinds": self._kinds}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.prompt_lengths, self.response_lengths = (torch.from_numpy(np.array(a)) for a in state["lengths"])
        self.width, self._kinds = state["width"], state["kinds"]
        self.device, self._copied = torch.device("cpu"), {}
        lengths = {TOKEN: self.lengths.numpy(), RESPONSE_TOKEN: self.response_lengths.numpy()}
        self._columns = {n: p.restore(lengths.get(self._kinds[n])) for n, p in state["columns"].items()}
