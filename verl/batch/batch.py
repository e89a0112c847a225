"""The one batch: what a response is, from the engine to the loss and the checkpoint.

A response is an episode: a prompt, then tokens that the policy sampled and, in a conversation, tokens that an
environment wrote. A batch holds B of them in flat columns, so that what travels between processes is what exists. Each
stage of a training step fills the columns that it knows. Padding exists only in :meth:`Batch.padded` and
:meth:`Batch.rows`, for pure functions and models that need rows of one length.

Columns may be on a GPU. The lengths never are: what follows from them (masks, the places of tokens) is computed on the
host and sent, so that nobody waits for the GPU to know a size.

Legend: B episodes, N tokens, M of them in responses (everything after the prompt), P and R the columns of padded
prompts and responses, L captured layers, D hidden width.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from verl.batch.columns import (
    EPISODE,
    FEW,
    KINDS,
    POLICY,
    PREFIX,
    RANK,
    RESPONSE_TOKEN,
    TOKEN,
    TURN_RANK,
    Columns,
    declared_kind,
)
from verl.batch.flat import concat, positions_within, spans, sums_within, take
from verl.batch.serialization import Packed
from verl.utils.device import to_device, to_host


class Batch(Columns):
    """B episodes in the columns of :class:`Columns`.

    ``batch[rows]`` selects episodes, ``name in batch`` tests whether a column is filled.

    Example: two turns with a calculator, and a single-turn response (B = 2, N = 14, M = 9)::

        prompt    response                          prompt_lengths    [3, 2]
        P P P     A A E E A A                       response_lengths  [6, 3]
        P P       A A A
        tokens    P P P A A E E A A P P A A A       [N], of all episodes, one after the other
        source          0 0 1 1 0 0     0 0 0       [M], 1 where the environment wrote the token
        learn_mask      1 1 0 0 1 1     1 1 1       [M]
        scores          0.0             1.0         [B]
        padded("advantages")                        [B, R], R = 6, zeros after the third token of the second row
    """

    def __init__(
        self, prompt_lengths: Tensor, response_lengths: Tensor, width: int | None = None, **columns: Any
    ) -> None:
        """Make a batch of episodes with these lengths.

        Args:
            prompt_lengths, response_lengths: [B] int64 on the CPU, tokens of each.
            width: R, at least the longest response; None: that.
            columns: as :meth:`fill` takes them.
        """
        self.prompt_lengths = prompt_lengths
        self.response_lengths = response_lengths
        self.width = self.longest_response if width is None else width
        self.device = torch.device("cpu")
        """Device of the columns, to which :meth:`to` has moved them, and of the masks."""
        self._sent: dict[str, Tensor] = {}
        self._columns: dict[str, Any] = {}
        self._kinds: dict[str, str] = {}
        self.fill(**columns)

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], **columns: Any) -> Self:
        """Episodes with these tokens; ``columns`` as :meth:`fill` takes them."""
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
        """[B] int64, tokens of each episode."""
        return self.prompt_lengths + self.response_lengths

    @property
    def longest_response(self) -> int:
        """Tokens of the longest response."""
        return int(self.response_lengths.max()) if len(self) else 0

    @property
    def mask(self) -> Tensor:
        """[B, R] bool, true on response tokens."""
        return self._there("mask", lambda: torch.arange(self.width) < self.response_lengths[:, None])

    @property
    def policy_mask(self) -> Tensor:
        """[B, R] bool, true on response tokens that the policy sampled: all but those of an environment."""
        return self.pad(self.by_policy, False) if "source" in self else self.mask

    @property
    def by_policy(self) -> Tensor:
        """[M] bool, whether the policy sampled a response token."""
        if "source" in self:
            return self.source == POLICY
        return torch.ones(self._size(RESPONSE_TOKEN), dtype=torch.bool, device=self.device)

    @property
    def policy_lengths(self) -> Tensor:
        """[B] int64, tokens of each response that the policy sampled."""
        return self.policy_mask.sum(dim=1)

    @property
    def learned_responses(self) -> Tensor:
        """[B] bool on the CPU, responses with a token to learn from."""
        return sums_within(self.learn_mask.long().cpu(), self.response_lengths) > 0

    @property
    def in_response(self) -> Tensor:
        """[N] bool, whether a token is after its prompt."""
        return self._there("in_response", self._after_prompts)

    @property
    def predictors(self) -> Tensor:
        """[M] int64, the index among the N of the token before each response token, from which it is predicted."""
        return self._there("predictors", lambda: self._after_prompts().nonzero().flatten() - 1)

    @property
    def response_tokens(self) -> Tensor:
        """[M] int64."""
        tokens: Tensor = self.tokens
        return tokens[self._there("responses", lambda: self._after_prompts().nonzero().flatten())]

    def _after_prompts(self) -> Tensor:
        lengths = torch.stack([self.prompt_lengths, self.response_lengths], dim=1).flatten()
        return torch.arange(len(lengths)).remainder(2).bool().repeat_interleave(lengths)

    def _places(self) -> Tensor:
        """[M] int64, where response tokens are in [B, R], flattened."""
        rows, lengths = torch.arange(len(self)), self.response_lengths
        return self._there("places", lambda: (rows * self.width).repeat_interleave(lengths) + positions_within(lengths))

    def _there(self, name: str, computed: Callable[[], Tensor]) -> Tensor:
        """Compute on the host and move to the columns' device; for a GPU once."""
        if self.device.type == "cpu":
            return computed()
        if name not in self._sent:
            self._sent[name] = to_device(computed(), self.device)
        return self._sent[name]

    # --- Columns ---

    def fill(self, kind: str | None = None, /, **columns: Any) -> Self:
        """Set columns, in place; returns the batch. None leaves a column as it is.

        A response-token column with one number a token may be given padded, [B, R]; what is on padding is dropped.

        Args:
            kind: ``EPISODE`` or ``RESPONSE_TOKEN``, what those columns have one entry for that the class does not
                declare. None: the length says it.

        Raises:
            ValueError: a column fits neither, or both and is not declared, or an attribute of its name would hide it.
        """
        for name, values in columns.items():
            if values is None:
                continue
            if name in self.__dict__ or hasattr(type(self), name):
                raise ValueError(f"column {name}: a batch has an attribute of this name; rename it")
            known = declared_kind(name) or (EPISODE if isinstance(values, list) else kind)
            padded = isinstance(values, Tensor) and values.shape == (len(self), self.width)
            if padded and known in (RESPONSE_TOKEN, None) and name not in FEW and not name.startswith(PREFIX):
                known, values = RESPONSE_TOKEN, self.flat(values)
            self._set(name, values, known or self._guessed(name, values))
        return self

    def _guessed(self, name: str, values: Tensor) -> str:
        """Infer the kind of a custom column from its length."""
        if len(values) == len(self) == self._size(RESPONSE_TOKEN):
            raise ValueError(
                f"column {name}: {len(values)} entries, and the batch has as many episodes as response tokens; say "
                f"which they are: fill({EPISODE!r}, {name}=...) or fill({RESPONSE_TOKEN!r}, {name}=...)"
            )
        return EPISODE if len(values) == len(self) else RESPONSE_TOKEN

    def _set(self, name: str, values: Any, kind: str) -> None:
        if len(values) != self._size(kind):
            shape = tuple(values.shape) if isinstance(values, Tensor) else len(values)
            raise ValueError(f"column {name}: {shape}; expected one entry for each of {self._size(kind)} {kind}s")
        self._columns[name], self._kinds[name] = values, kind

    def columns(self, *names: str) -> Self:
        """Return the same episodes with the named columns, as far as they are filled.

        Raises:
            ValueError: a name that is neither filled nor declared.
        """
        for name in names:
            if name not in self._columns and declared_kind(name) is None:
                raise ValueError(self._missing(name))
        chosen = {name: self._columns[name] for name in names if name in self._columns}
        return self._like(self.prompt_lengths, self.response_lengths, chosen)

    @property
    def names(self) -> list[str]:
        """The columns that are filled."""
        return list(self._columns)

    def kind_of(self, name: str) -> str:
        """Return the kind of a filled column, as :meth:`fill` takes it."""
        return self._kinds[name]

    def without(self, *names: str) -> Self:
        """Return the same episodes without the named columns."""
        return self.columns(*(name for name in self.names if name not in names))

    def merge(self, other: "Batch") -> Self:
        """Take over the columns of ``other``, which has the same episodes; returns the batch."""
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
        """Metric name -> [B, L], in the order the calculator gives them; none where nothing is captured."""
        return self._family(RANK)

    @property
    def turn_metrics(self) -> dict[str, Tensor]:
        """Metric name -> [B, K, L], of the first K turns of conversations; none of other responses."""
        return self._family(TURN_RANK)

    @property
    def prefix_metrics(self) -> dict[str, Tensor]:
        """Metric name -> [M, L], of the response up to each token; none without ``calculator.keep_prefixes``."""
        return self._family(PREFIX)

    def _family(self, prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): v for name, v in self._columns.items() if name.startswith(prefix)}

    def padded(self, name: str, fill: float = 0.0) -> Tensor:
        """Return a response-token column as [B, R, ...], ``fill`` on padding; a column of episodes unchanged."""
        if name == "response_tokens":
            return self.pad(self.response_tokens, fill)
        values: Tensor = getattr(self, name)
        return self.pad(values, fill) if self._kinds[name] == RESPONSE_TOKEN else values

    def flat(self, values: Tensor) -> Tensor:
        """Invert :meth:`pad`: return [M, ...] from ``values [B, R, ...]``."""
        return values.flatten(0, 1)[to_device(self._places(), values.device)]

    def pad(self, values: Tensor, fill: float = 0.0) -> Tensor:
        """``values [M, ...]`` of response tokens as [B, R, ...], ``fill`` on padding."""
        rows = values.new_full((len(self) * self.width, *values.shape[1:]), fill)
        rows[to_device(self._places(), values.device)] = values
        return rows.view(len(self), self.width, *values.shape[1:])

    def rows(self, pad_token_id: int = 0) -> tuple[Tensor, Tensor]:
        """Return token ids and attention mask, [B, P + R] int64 on the CPU.

        Prompts are padded on the left, responses on the right.

        Position P is the first response token of every row.
        """
        longest_prompt = int(self.prompt_lengths.max()) if len(self) else 0
        places = torch.arange(-longest_prompt, self.width)
        there = (places >= -self.prompt_lengths[:, None]) & (places < self.response_lengths[:, None])
        input_ids = torch.full(there.shape, pad_token_id, dtype=torch.int64)
        input_ids[there] = self.tokens
        return input_ids, there.long()

    # --- Episodes ---

    def __getitem__(self, rows: Tensor | slice | Sequence[int]) -> Self:
        """Select the episodes at these indices, or of this mask [B] bool, in that order; their entries are copied."""
        counts = {TOKEN: self.lengths, RESPONSE_TOKEN: self.response_lengths}
        places: dict[str, Any]
        index: Any
        if isinstance(rows, slice) and rows.step in (None, 1):
            # The entries of neighbours are neighbours too, so that no index of tokens is made.
            start, stop, _ = rows.indices(len(self))
            index = slice(start, max(start, stop))
            places = {kind: slice(int(n[:start].sum()), int(n[: index.stop].sum())) for kind, n in counts.items()}
        else:
            index = torch.as_tensor(range(len(self))[rows] if isinstance(rows, slice) else rows)
            if index.dim() != 1:
                raise TypeError(
                    f"batch[{rows}]: not a list, mask or slice of episodes; batch[[i]] has the single one i"
                )
            index = index.nonzero().flatten() if index.dtype == torch.bool else index.long()
            places = {kind: spans(n, index) for kind, n in counts.items()}
        places[EPISODE] = index
        chosen = {name: take(values, places[self._kinds[name]]) for name, values in self._columns.items()}
        return self._like(take(self.prompt_lengths, index), take(self.response_lengths, index), chosen)

    def split(self, num_rows: int) -> Iterator[Self]:
        """Consecutive parts of ``num_rows`` episodes, the last of what is left."""
        return (self[start : start + num_rows] for start in range(0, len(self), num_rows))

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """Join the episodes of all parts, with the declared columns that all of them have.

        Raises:
            ValueError: no parts, or an undeclared column that some of them lack.
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

    def trimmed(self) -> Self:
        """Return the same episodes with R = the longest response."""
        return self._like(self.prompt_lengths, self.response_lengths, self._columns, self.longest_response)

    def widened(self, width: int) -> Self:
        """Return the same episodes with R = ``width``, at least the longest response."""
        return self._like(self.prompt_lengths, self.response_lengths, self._columns, width)

    def to(self, device: str | torch.device) -> Self:
        """Move the columns to ``device``; the host waits for a GPU only if they come from it, and once."""
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
        """Return a batch with other episodes or columns, which are not checked again."""
        batch = type(self)(prompts, responses, self.width if width is None else width)
        batch._columns = dict(columns)
        batch._kinds = {name: self._kinds[name] for name in columns}
        batch.device = self.device
        return batch

    # --- Travel between processes ---

    def __getstate__(self) -> dict[str, Any]:
        """Pickle columns as numpy arrays, which Ray reads in place, in few bytes (:class:`Packed`)."""
        token_lengths = {TOKEN: self.lengths.numpy(), RESPONSE_TOKEN: self.response_lengths.numpy()}
        packed = {n: Packed.of(v, token_lengths.get(self._kinds[n])) for n, v in self._columns.items()}
        lengths = (self.prompt_lengths.numpy(), self.response_lengths.numpy())
        return {"lengths": lengths, "width": self.width, "columns": packed, "kinds": self._kinds}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.prompt_lengths, self.response_lengths = (torch.from_numpy(np.array(a)) for a in state["lengths"])
        self.width, self._kinds = state["width"], state["kinds"]
        self.device, self._sent = torch.device("cpu"), {}
        lengths = {TOKEN: self.lengths.numpy(), RESPONSE_TOKEN: self.response_lengths.numpy()}
        self._columns = {n: p.restore(lengths.get(self._kinds[n])) for n, p in state["columns"].items()}
