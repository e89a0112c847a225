"""Model input layouts of a micro-batch: padded, or packed into one sequence.

Packed sequences can share prompts. In a causal model, the hidden states of a prompt do not depend on the response. A
prompt with several responses is therefore stored only once, before all responses. Only attention needs to know which
prompt belongs to each response.

Layouts are computed on the host and then sent to the device, so that no operation waits for a GPU.

Shapes: B episodes with N tokens; T tokens in this worker's layout; G distinct prompts; P tokens in the longest prompt
and Q in the longest response.
"""

from functools import cached_property
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from verl.batch import Batch
from verl.batch.flat import positions_within
from verl.models.sequence_parallel import gather_tokens
from verl.utils.device import to_device

ROUND_TO = 128
"""Sequences with shared prompts are padded to a multiple of this many tokens, so that the allocator can reuse buffers.
On a CPU, allocating new buffers would cancel the time saved by sharing prompts."""

MIN_SHARED = 0.05
"""Minimum fraction of a micro-batch's tokens that sharing prompts must save; otherwise, prompts are not shared."""

NO_MASK = (1, 1, 1, 1)
"""Shape of a dummy mask. Without a mask, ``transformers`` would search the position ids for packed sequences, and the
host would wait for the device."""

_NOWHERE = torch.iinfo(torch.int64).max
"""Position assigned to masked keys."""


class Layout:
    """Model inputs for a micro-batch, and the positions of the micro-batch's tokens in these inputs.

    Example: prompts ``a b`` and ``c`` with responses ``d`` and ``e f`` are packed as ``input_ids`` [[a b d c e f]],
    ``position_ids`` [[0 1 2 0 1 2]], ``cu_seq_lens_q`` [0, 3, 6].
    """

    def __init__(self, inputs: dict[str, Any], places: Tensor, group: ProcessGroup | None = None) -> None:
        """Store the model inputs.

        Args:
            inputs: keyword arguments for the model, with tensors on the CPU.
            places: [N] int64 on the CPU, index of each token in the flattened rows or, with ``group``, in the full
                sequence.
            group: workers that have slices of equal length of the sequence, or None if this worker has all of it.
        """
        self.inputs, self.places, self.group = inputs, places, group

    def on(self, device: str) -> dict[str, Any]:
        """Return the model's keyword arguments on ``device``."""
        inputs: dict[str, Any] = {
            name: to_device(v, device) if isinstance(v, Tensor) else v for name, v in self.inputs.items()
        }
        if "shared_prompts" in inputs:
            inputs["shared_prompts"] = inputs["shared_prompts"].on(device)
        return inputs

    def find(self, tokens: Tensor) -> tuple[Tensor, Tensor | slice]:
        """Find this worker's tokens among ``tokens [n]``, given as indices into the N tokens.

        Returns:
            Positions of these tokens among this worker's T tokens, and their indices in ``tokens``.
        """
        places = self.places[tokens]
        if self.group is None:
            return places, slice(None)
        size = self.inputs["input_ids"].shape[1]
        here = (places // size == self.group.rank()).nonzero().flatten()
        return places[here] - size * self.group.rank(), here

    def collect(self, values: Tensor, tokens: Tensor) -> Tensor:
        """Gather the values [n, ...] of ``tokens [n]`` from the workers that process these tokens.

        Differentiable. All workers of the group must call this method together.
        """
        if self.group is None:
            return values
        local = values.new_zeros(self.inputs["input_ids"].shape[1], *values.shape[1:])
        here, places = (to_device(index, values.device) for index in (self.find(tokens)[0], self.places[tokens]))
        return gather_tokens(local.index_copy(0, here, values), self.group)[places]


def take_tokens(states: Tensor, tokens: Tensor, dim: int = 0) -> Tensor:
    """Select ``tokens [n]`` along ``dim`` with a gradient that is bitwise reproducible.

    The backward pass sums the gradients of repeated tokens. On a CPU, the order of summation is fixed only for
    ``index_select``; on a GPU, it is fixed only for ``states[tokens]``.
    """
    if states.is_cuda:
        return states[(slice(None),) * dim + (tokens,)]
    return states.index_select(dim, tokens)


def padded_layout(batch: Batch) -> Layout:
    """Pad prompts to the longest prompt and responses to the longest response, so that T = B (P + Q)."""
    input_ids, attention_mask = batch.trimmed().rows()
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids(attention_mask)}
    return Layout(inputs, attention_mask.flatten().nonzero().flatten())


def packed_layout(batch: Batch, group: ProcessGroup | None = None) -> Layout:
    """Concatenate the episodes without padding.

    If the tokens cannot be divided evenly among the workers of ``group``, a padding sequence is appended.
    """
    num_tokens, size = len(batch.tokens), 1 if group is None else group.size()
    padding = -num_tokens % size
    lengths = torch.cat([batch.lengths, batch.lengths.new_tensor([padding])])
    lengths = lengths[lengths > 0]
    bounds, longest = _bounds(lengths), int(lengths.max())
    sequence = (F.pad(batch.tokens, (0, padding)), positions_within(lengths))
    ids, positions = (part.tensor_split(size)[0 if group is None else group.rank()][None] for part in sequence)
    inputs: dict[str, Any] = {"input_ids": ids, "position_ids": positions}
    inputs |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}
    if group is not None:
        inputs["sequence_group"] = group
    return Layout(inputs, torch.arange(num_tokens), group)


def position_ids(attention_mask: Tensor) -> Tensor:
    """Return position ids [B, S] that do not count padding, so that left padding does not shift them."""
    return (attention_mask.cumsum(dim=1) - 1).clamp(min=0)


class Rows(NamedTuple):
    """Cumulative lengths, [rows + 1] int32, and maximum lengths of the queries and keys of packed sequences."""

    queries: Tensor
    keys: Tensor
    most_queries: int
    most_keys: int


class Block(NamedTuple):
    """A group of sequences of similar length."""

    rows: Tensor
    """Sequence indices, [b] int64."""
    longest: int
    """Number of tokens in the longest sequence."""


def blocks_by_length(lengths: Tensor) -> list[Block]:
    """Group sequences of ``lengths [B]``, longest first, into blocks that are at most half padding.

    A sequence less than half as long as the first in a block starts a new one. Empty sequences count as one token.
    """
    order, blocks = lengths.argsort(descending=True, stable=True), list[Block]()
    while len(order):
        longest = max(1, int(lengths[order[0]]))
        size = int((2 * lengths[order] >= longest).sum()) or len(order)
        blocks.append(Block(order[:size], longest))
        order = order[size:]
    return blocks


class SharedPrompts:
    """Packed sequence of the distinct prompts followed by the responses in batch order.

    Properties are computed on the host on first use, sent to the device, and cached.
    """

    def __init__(self, prompt_lengths: Tensor, response_lengths: Tensor, prompt_of: Tensor) -> None:
        """Compute the positions of all prompts and responses in the packed sequence.

        Args:
            prompt_lengths: [G] int64 on the CPU, in tokens.
            response_lengths: [B] int64 on the CPU, in tokens.
            prompt_of: [B] int64 on the CPU, prompt index of each response.
        """
        self.prompt_lengths, self.response_lengths, self._prompt_of = prompt_lengths, response_lengths, prompt_of
        self.device = "cpu"
        lengths = torch.cat([prompt_lengths, response_lengths])
        starts = (lengths.cumsum(dim=0) - lengths).split([len(prompt_lengths), len(response_lengths)])
        self.num_tokens = int(lengths.sum())
        self.prompt_starts, self.response_starts = starts
        self.longest_prompt = max(1, int(prompt_lengths.max()))
        self.longest_response = max(1, int(response_lengths.max()))
        self._attention_masks: dict[int | None, list[Tensor]] = {}
        self._masks = (
            _is_token(prompt_lengths, self.longest_prompt),
            _is_token(response_lengths, self.longest_response),
        )
        self._of_prompts = self._tokens(self.prompt_starts, self.longest_prompt)
        self._of_responses = self._tokens(self.response_starts, self.longest_response)

    def on(self, device: str) -> Self:
        moved = type(self)(self.prompt_lengths, self.response_lengths, self._prompt_of)
        moved.device = device
        return moved

    @cached_property
    def _blocks(self) -> tuple[list[Block], list[Block]]:
        """Blocks of prompts and blocks of responses."""
        return blocks_by_length(self.prompt_lengths), blocks_by_length(self.response_lengths)

    @cached_property
    def prompt_blocks(self) -> list[Tensor]:
        """Token indices [g, P] of the prompts in each block, padded to length P. Indices at padding are arbitrary."""
        return [to_device(self._of_prompts[rows, :longest], self.device) for rows, longest in self._blocks[0]]

    @cached_property
    def response_blocks(self) -> list[tuple[Tensor, Tensor]]:
        """Token indices [b, Q] of each block's responses, and [b, P + Q] of their keys, which include the prompts.

        P and Q are the block's maximum lengths. Indices at padding are arbitrary.
        """
        blocks = []
        for rows, longest in self._blocks[1]:
            queries, prompt_of = self._of_responses[rows, :longest], self._prompt_of[rows]
            keys = torch.cat([self._of_prompts[prompt_of, : self._longest_prompt(rows)], queries], dim=1)
            blocks.append((to_device(queries, self.device), to_device(keys, self.device)))
        return blocks

    def _longest_prompt(self, rows: Tensor) -> int:
        return max(1, int(self.prompt_lengths[self._prompt_of[rows]].max()))

    def _tokens(self, starts: Tensor, longest: int) -> Tensor:
        return (starts[:, None] + torch.arange(longest)).clamp(max=self.num_tokens - 1)

    @cached_property
    def block_index(self) -> Tensor:
        """Index of each token in the concatenation of the flattened prompt and response blocks, [T] int64."""
        sources = zip((self._of_prompts, self._of_responses), self._masks, self._blocks, strict=True)
        blocks = [(tokens[rows, :end], mask[rows, :end]) for tokens, mask, cut in sources for rows, end in cut]
        places = torch.empty(self.num_tokens, dtype=torch.int64)
        is_token = torch.cat([mask.flatten() for _, mask in blocks])
        places[torch.cat([tokens.flatten() for tokens, _ in blocks])[is_token]] = is_token.nonzero().flatten()
        return to_device(places, self.device)

    def attention_masks(self, window: int | None) -> list[Tensor]:
        """Return the mask of each response block, [b, 1, Q, P + Q] bool. ``window`` is None for full attention."""
        if window not in self._attention_masks:  # Layers with equal windows share the masks.
            self._attention_masks[window] = [self._attention_mask(block, window) for block in self._blocks[1]]
        return self._attention_masks[window]

    def _attention_mask(self, block: Block, window: int | None) -> Tensor:
        prompt_of, longest = self._prompt_of[block.rows], self._longest_prompt(block.rows)
        queries = self.prompt_lengths[prompt_of][:, None] + torch.arange(block.longest)
        of_prompts = torch.arange(longest).expand(len(queries), -1)
        # Mask the padding of prompts.
        of_prompts = of_prompts.masked_fill(~self._masks[0][prompt_of, :longest], _NOWHERE)
        keys = torch.cat([of_prompts, queries], dim=1)
        queries, keys = (to_device(positions, self.device) for positions in (queries, keys))
        return causal_mask(queries, keys, window)[:, None]

    @cached_property
    def rows(self) -> Rows:
        """Query and key boundaries of all prompts, followed by those of all responses, in the order of :attr:`keys`."""
        whole = self.prompt_lengths[self._prompt_of] + self.response_lengths
        most = max(self.longest_prompt, self.longest_response), max(self.longest_prompt, int(whole.max()))
        lengths = (torch.cat([self.prompt_lengths, rows]) for rows in (self.response_lengths, whole))
        queries, keys = (to_device(_bounds(rows), self.device) for rows in lengths)
        return Rows(queries, keys, *most)

    @cached_property
    def keys(self) -> Tensor:
        """Token indices of each prompt's keys, followed by those of each response's keys, which include its prompt."""
        tokens = torch.cat([self._of_prompts[self._prompt_of], self._of_responses], dim=1)
        mask = torch.cat([self._masks[0][self._prompt_of], self._masks[1]], dim=1)
        return to_device(torch.cat([self._of_prompts[self._masks[0]], tokens[mask]]), self.device)


def _is_token(lengths: Tensor, longest: int) -> Tensor:
    """Return the token mask [N, longest] of sequences with ``lengths [N]``, which is false at padding."""
    return torch.arange(longest) < lengths[:, None]


def _bounds(lengths: Tensor) -> Tensor:
    """Return the cumulative lengths, [rows + 1] int32."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(dim=0)]).to(torch.int32)


def causal_mask(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Return the causal mask [B, Q, N] for the token positions ``queries [B, Q]`` and ``keys [B, N]``."""
    mask = keys[:, None] <= queries[:, :, None]
    return mask if window is None else mask & (keys[:, None] > queries[:, :, None] - window)


def _prompts(batch: Batch) -> list[tuple[int, ...]]:
    return [tuple(part.tolist()) for part in batch.tokens[~batch.in_response].split(batch.prompt_lengths.tolist())]


def prompt_index(batch: Batch) -> Tensor:
    """Return the prompt index of each sequence, [B] int64. Prompts are numbered in order of first appearance."""
    index: dict[tuple[int, ...], int] = {}
    return torch.tensor([index.setdefault(prompt, len(index)) for prompt in _prompts(batch)], dtype=torch.int64)


def shared_prompt_layout(batch: Batch) -> tuple[Layout, float]:
    """Return the layout of the distinct prompts and all responses, and the fraction of tokens that sharing saves.

    Sequences must not be empty.
    """
    is_response, prompts = batch.in_response, _prompts(batch)
    # 1. Sort the distinct prompts: gradients are summed in this order, which must not depend on the order of rows.
    distinct = sorted(set(prompts), key=lambda prompt: (len(prompt), prompt))
    index = {prompt: i for i, prompt in enumerate(distinct)}
    responses = batch.response_lengths
    prompt_of = torch.tensor([index[prompt] for prompt in prompts])
    lengths = torch.tensor([len(prompt) for prompt in distinct])
    shared = SharedPrompts(lengths, responses, prompt_of)
    padding = -shared.num_tokens % ROUND_TO
    # 2. Find the position of each token. Every row consists of a prompt and a response.
    starts = torch.stack([shared.prompt_starts[prompt_of], shared.response_starts], dim=1).flatten()
    sizes = torch.stack([batch.prompt_lengths, responses], dim=1).flatten()
    places = starts.repeat_interleave(sizes) + positions_within(sizes)
    # 3. Concatenate the inputs.
    ids = torch.tensor([token for prompt in distinct for token in prompt], dtype=torch.int64)
    positions = [positions_within(lengths), positions_within(batch.lengths)[is_response]]
    inputs = {
        "input_ids": F.pad(torch.cat([ids, batch.tokens[is_response]]), (0, padding))[None],
        "position_ids": F.pad(torch.cat(positions), (0, padding))[None],
        "shared_prompts": shared,
    }
    num_unshared = len(batch.tokens)
    return Layout(inputs, places), (num_unshared - shared.num_tokens) / max(1, num_unshared)
