"""How a micro-batch is laid out for a model: padded rows, or rows packed into one sequence.

The responses of a group have their prompt in common, and what a causal model computes at a prompt's tokens does not
depend on what follows. Packed, its tokens can therefore stand in the sequence once, before all responses. The attention
alone knows which prompt a response continues: its tokens see the prompt's and those before them.

A layout is computed on the host, from tokens that are still there, and then sent: on a GPU nothing waits for it.

Legend: B episodes, N tokens of them all, T tokens as the model of this worker reads them; G different prompts, P and Q
tokens of the longest prompt and response.
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
"""Sequences with shared prompts are filled up to a multiple of this many tokens. Buffers then come in a few sizes and
are used again; new sizes mean new memory, and on a CPU asking for it takes as long as sharing prompts saves."""

LEAST_SHARED = 0.05
"""Smallest share of a micro-batch's tokens that must be saved; for less, rows are packed whole."""

NO_MASK = (1, 1, 1, 1)
"""The shape of a mask that stands for none. Without any, ``transformers`` would look for rows in the positions, and the
host would wait to see whether there are several."""

_NOWHERE = torch.iinfo(torch.int64).max
"""The position of a key that nothing sees."""


class Layout:
    """A micro-batch as the model reads it, and where each of its tokens is."""

    def __init__(self, inputs: dict[str, Any], places: Tensor, group: ProcessGroup | None = None) -> None:
        """Describe the rows that a model reads.

        Args:
            inputs: keyword arguments of the model, on the CPU.
            places: [N] int64 on the CPU, the place of each token in the sequence that the workers of ``group`` read
                together; in padded rows, in these rows flattened.
            group: workers that each read a slice of the sequence, all of one length; None: this worker reads all.
        """
        self.inputs, self.places, self.group = inputs, places, group

    def on(self, device: str) -> dict[str, Any]:
        """Keyword arguments of the model on the device where it is."""
        inputs: dict[str, Any] = {
            name: to_device(v, device) if isinstance(v, Tensor) else v for name, v in self.inputs.items()
        }
        if "shared_prompts" in inputs:
            inputs["shared_prompts"] = inputs["shared_prompts"].on(device)
        return inputs

    def find(self, tokens: Tensor) -> tuple[Tensor, Tensor | slice]:
        """Which of ``tokens [n]``, as indices of the N, this worker reads.

        Returns:
            Their places among its T tokens, and an index of them in ``tokens``.
        """
        places = self.places[tokens]
        if self.group is None:
            return places, slice(None)
        size = self.inputs["input_ids"].shape[1]
        here = (places // size == self.group.rank()).nonzero().flatten()
        return places[here] - size * self.group.rank(), here

    def collect(self, values: Tensor, tokens: Tensor) -> Tensor:
        """Join the workers' parts of ``tokens [n]``: [n, ...] from the values that each has.

        Differentiable. Workers that share a sequence must call it together.
        """
        if self.group is None:
            return values
        read = values.new_zeros(self.inputs["input_ids"].shape[1], *values.shape[1:])
        here, places = (to_device(found, values.device) for found in (self.find(tokens)[0], self.places[tokens]))
        return gather_tokens(read.index_copy(0, here, values), self.group)[places]


def padded_layout(batch: Batch) -> Layout:
    """Rows of one length, T = B (P + R)."""
    input_ids, attention_mask = batch.trimmed().rows()
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids(attention_mask)}
    return Layout(inputs, attention_mask.flatten().nonzero().flatten())


def packed_layout(batch: Batch, group: ProcessGroup | None = None) -> Layout:
    """Episodes one after another without padding.

    Where the tokens cannot be divided evenly among the workers of ``group``, the last slice ends in a row of fillers.
    """
    num_tokens, size = len(batch.tokens), 1 if group is None else group.size()
    fillers = -num_tokens % size
    lengths = torch.cat([batch.lengths, batch.lengths.new_tensor([fillers])])
    lengths = lengths[lengths > 0]
    bounds, longest = _bounds(lengths), int(lengths.max())
    whole = (F.pad(batch.tokens, (0, fillers)), positions_within(lengths))
    ids, positions = (row.tensor_split(size)[0 if group is None else group.rank()][None] for row in whole)
    inputs: dict[str, Any] = {"input_ids": ids, "position_ids": positions}
    inputs |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}
    if group is not None:
        inputs["sequence_group"] = group
    return Layout(inputs, torch.arange(num_tokens), group)


def position_ids(attention_mask: Tensor) -> Tensor:
    """[B, S] positions that count real tokens only, so that left padding does not shift a row."""
    return (attention_mask.cumsum(dim=1) - 1).clamp(min=0)


class Rows(NamedTuple):
    """Boundaries of rows in a packed sequence, [rows + 1] int32, and the length of the longest."""

    queries: Tensor
    keys: Tensor
    most_queries: int
    most_keys: int


class Block(NamedTuple):
    """Rows of similar length."""

    rows: Tensor
    """[b] int64."""
    longest: int
    """Tokens of the longest."""


def blocks_by_length(lengths: Tensor) -> list[Block]:
    """Return the rows of ``lengths [B]`` from long to short, in blocks of which at most half is padding.

    A block ends before a row of less than half the tokens of its first. Empty rows have a block of one token each.
    """
    order, blocks = lengths.argsort(descending=True, stable=True), list[Block]()
    while len(order):
        longest = max(1, int(lengths[order[0]]))
        size = int((2 * lengths[order] >= longest).sum()) or len(order)
        blocks.append(Block(order[:size], longest))
        order = order[size:]
    return blocks


class SharedPrompts:
    """Places of prompts and responses in the sequence: prompts first, then the responses of row 0, 1, ...

    All that it says is on one device, and computed on the host, from where it is sent when it is first asked for.
    """

    def __init__(self, prompt_lengths: Tensor, response_lengths: Tensor, prompt_of: Tensor) -> None:
        """Lay out prompts once, followed by all responses.

        Args:
            prompt_lengths: [G] int64 on the CPU, tokens.
            response_lengths: [B] int64 on the CPU, tokens.
            prompt_of: [B] int64 on the CPU, the prompt of each row.
        """
        self.prompt_lengths, self.response_lengths, self._prompt_of = prompt_lengths, response_lengths, prompt_of
        self.device = "cpu"
        lengths = torch.cat([prompt_lengths, response_lengths])
        starts = (lengths.cumsum(dim=0) - lengths).split([len(prompt_lengths), len(response_lengths)])
        self.num_tokens = int(lengths.sum())
        self.prompt_starts, self.response_starts = starts
        self.longest_prompt = max(1, int(prompt_lengths.max()))
        self.longest_response = max(1, int(response_lengths.max()))
        self._seen: dict[int | None, list[Tensor]] = {}
        self._masks = _within(prompt_lengths, self.longest_prompt), _within(response_lengths, self.longest_response)
        self._of_prompts = self._tokens(self.prompt_starts, self.longest_prompt)
        self._of_responses = self._tokens(self.response_starts, self.longest_response)

    def on(self, device: str) -> Self:
        """Return the same on a device."""
        moved = type(self)(self.prompt_lengths, self.response_lengths, self._prompt_of)
        moved.device = device
        return moved

    @cached_property
    def _blocks(self) -> tuple[list[Block], list[Block]]:
        """Of prompts and of responses."""
        return blocks_by_length(self.prompt_lengths), blocks_by_length(self.response_lengths)

    @cached_property
    def prompt_blocks(self) -> list[Tensor]:
        """The tokens of prompts of similar length, [g, P] of each block; any beyond a length. P is the longest's."""
        return [to_device(self._of_prompts[rows, :longest], self.device) for rows, longest in self._blocks[0]]

    @cached_property
    def response_blocks(self) -> list[tuple[Tensor, Tensor]]:
        """Return the response tokens of each block of similar lengths, [b, Q], and their possible keys, [b, P + Q].

        The keys are of their prompts and of themselves; any beyond a length. P and Q are the longest of the block.
        """
        blocks = []
        for rows, longest in self._blocks[1]:
            own, prompt_of = self._of_responses[rows, :longest], self._prompt_of[rows]
            keys = torch.cat([self._of_prompts[prompt_of, : self._longest_prompt(rows)], own], dim=1)
            blocks.append((to_device(own, self.device), to_device(keys, self.device)))
        return blocks

    def _longest_prompt(self, rows: Tensor) -> int:
        return max(1, int(self.prompt_lengths[self._prompt_of[rows]].max()))

    def _tokens(self, starts: Tensor, longest: int) -> Tensor:
        return (starts[:, None] + torch.arange(longest)).clamp(max=self.num_tokens - 1)

    @cached_property
    def in_blocks(self) -> Tensor:
        """[T], where each token is in the blocks of prompts and then of responses, joined and flattened."""
        sources = zip((self._of_prompts, self._of_responses), self._masks, self._blocks, strict=True)
        blocks = [(tokens[rows, :end], mask[rows, :end]) for tokens, mask, cut in sources for rows, end in cut]
        places = torch.empty(self.num_tokens, dtype=torch.int64)
        is_token = torch.cat([mask.flatten() for _, mask in blocks])
        places[torch.cat([tokens.flatten() for tokens, _ in blocks])[is_token]] = is_token.nonzero().flatten()
        return to_device(places, self.device)

    def seen(self, window: int | None) -> list[Tensor]:
        """Return the keys that response tokens see, [b, 1, Q, P + Q] bool per block.

        ``window``: the most keys that a token sees, itself included.
        """
        if window not in self._seen:  # the same in all layers of a kind
            self._seen[window] = [self._seen_in(block, window) for block in self._blocks[1]]
        return self._seen[window]

    def _seen_in(self, block: Block, window: int | None) -> Tensor:
        prompt_of, longest = self._prompt_of[block.rows], self._longest_prompt(block.rows)
        queries = self.prompt_lengths[prompt_of][:, None] + torch.arange(block.longest)
        of_prompts = torch.arange(longest).expand(len(queries), -1)
        # Beyond its end a prompt's positions are those of no token.
        of_prompts = of_prompts.masked_fill(~self._masks[0][prompt_of, :longest], _NOWHERE)
        keys = torch.cat([of_prompts, queries], dim=1)
        queries, keys = (to_device(positions, self.device) for positions in (queries, keys))
        return tokens_seen(queries, keys, window)[:, None]

    @cached_property
    def rows(self) -> Rows:
        """Each prompt, and then each response; keys in the order of :attr:`keys`."""
        whole = self.prompt_lengths[self._prompt_of] + self.response_lengths
        most = max(self.longest_prompt, self.longest_response), max(self.longest_prompt, int(whole.max()))
        lengths = (torch.cat([self.prompt_lengths, rows]) for rows in (self.response_lengths, whole))
        queries, keys = (to_device(_bounds(rows), self.device) for rows in lengths)
        return Rows(queries, keys, *most)

    @cached_property
    def keys(self) -> Tensor:
        """[N], the tokens that each prompt, and then each response, sees: its prompt's and its own."""
        tokens = torch.cat([self._of_prompts[self._prompt_of], self._of_responses], dim=1)
        mask = torch.cat([self._masks[0][self._prompt_of], self._masks[1]], dim=1)
        return to_device(torch.cat([self._of_prompts[self._masks[0]], tokens[mask]]), self.device)


def _within(lengths: Tensor, longest: int) -> Tensor:
    """[N, longest] bool, whether there is a token, for ``lengths [N]``."""
    return torch.arange(longest) < lengths[:, None]


def _bounds(lengths: Tensor) -> Tensor:
    """[rows + 1] int32, where rows of these lengths start and end."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(dim=0)]).to(torch.int32)


def tokens_seen(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """[B, Q, N] bool, whether a token at position ``queries [B, Q]`` sees the one at ``keys [B, N]``."""
    seen = keys[:, None] <= queries[:, :, None]
    return seen if window is None else seen & (keys[:, None] > queries[:, :, None] - window)


def prompts_of(batch: Batch) -> list[tuple[int, ...]]:
    """Return the tokens of each row's prompt."""
    return [tuple(part.tolist()) for part in batch.tokens[~batch.in_response].split(batch.prompt_lengths.tolist())]


def numbered(prompts: list[tuple[int, ...]]) -> Tensor:
    """[B] int64, the same for equal prompts, in the order in which they appear."""
    numbers: dict[tuple[int, ...], int] = {}
    return torch.tensor([numbers.setdefault(prompt, len(numbers)) for prompt in prompts], dtype=torch.int64)


def shared_prompt_layout(batch: Batch) -> tuple[Layout, float]:
    """Each different prompt once, then all responses, and the share of the tokens of whole rows that this saves.

    Every row needs a prompt or a response.
    """
    is_response, prompts = batch.in_response, prompts_of(batch)
    # Sums of gradients depend on the order: that of the prompts must not depend on that of the rows.
    different = sorted(set(prompts), key=lambda prompt: (len(prompt), prompt))
    number = {prompt: place for place, prompt in enumerate(different)}
    responses = batch.response_lengths
    prompt_of = torch.tensor([number[prompt] for prompt in prompts])
    lengths = torch.tensor([len(prompt) for prompt in different])
    shared = SharedPrompts(lengths, responses, prompt_of)
    fillers = -shared.num_tokens % ROUND_TO
    # Where each token of the rows is read: at its place within the prompt or response that it belongs to.
    first = torch.stack([shared.prompt_starts[prompt_of], shared.response_starts], dim=1).flatten()
    sizes = torch.stack([batch.prompt_lengths, responses], dim=1).flatten()
    places = first.repeat_interleave(sizes) + positions_within(sizes)
    ids = torch.tensor([token for prompt in different for token in prompt], dtype=torch.int64)
    positions = [positions_within(lengths), positions_within(batch.lengths)[is_response]]
    inputs = {
        "input_ids": F.pad(torch.cat([ids, batch.tokens[is_response]]), (0, fillers))[None],
        "position_ids": F.pad(torch.cat(positions), (0, fillers))[None],
        "shared_prompts": shared,
    }
    num_whole = len(batch.tokens)
    return Layout(inputs, places), (num_whole - shared.num_tokens) / max(1, num_whole)
