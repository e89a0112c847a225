"""Packed rows of which each prompt is read once for all its responses.

The responses of a group have their prompt in common, and what a causal model computes at a prompt's tokens does not
depend on what follows. So its tokens stand in the sequence once, before all responses, and the attention alone knows
which prompt a response continues: its tokens see the prompt's and those before them.

Legend: B rows, S columns, R response columns, G different prompts, P and Q tokens of the longest prompt and response,
T tokens of the prompts and responses, H query heads, K key and value heads, D head width.
"""

from collections.abc import Callable
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from verl.batch import Batch, positions_within
from verl.models.packing import Layout

ROUND_TO = 128
"""Sequences are filled up to a multiple of this many tokens. Buffers then come in a few sizes and are used again; new
sizes mean new memory, and on a CPU asking for it takes as long as sharing prompts saves."""

LEAST_SHARED = 0.05
"""Smallest share of a micro-batch's tokens that must be saved; for less, rows are packed whole."""

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""From queries [B, H, Q, D], keys and values [B, K, N, D], and a mask [B, 1, Q, N], true where seen, to [B, H, Q, D].
Without a mask tokens see those before them."""


class SharedPrompts:
    """Where prompts and responses stand in the sequence: prompts first, then the responses of row 0, 1, ..."""

    def __init__(self, prompt_lengths: Tensor, response_lengths: Tensor, prompt_of: Tensor) -> None:
        """
        Args:
            prompt_lengths: [G] int64, tokens.
            response_lengths: [B] int64, tokens.
            prompt_of: [B] int64, the prompt of each row.
        """
        self.prompt_lengths, self.response_lengths, self.prompt_of = prompt_lengths, response_lengths, prompt_of
        ends = torch.cat([prompt_lengths, response_lengths]).cumsum(dim=0)
        self.num_tokens = int(ends[-1])
        starts = ends - torch.cat([prompt_lengths, response_lengths])
        self.prompt_starts, self.response_starts = starts.split([len(prompt_lengths), len(response_lengths)])
        self.longest_prompt = max(1, int(prompt_lengths.max()))
        self.longest_response = max(1, int(response_lengths.max()))
        self._seen: dict[int | None, Tensor] = {}

    @cached_property
    def prompt_tokens(self) -> Tensor:
        """[G, P], the tokens of each prompt; any beyond its length."""
        return self._tokens(self.prompt_starts, self.longest_prompt)

    @cached_property
    def response_tokens(self) -> Tensor:
        """[B, Q], the tokens of each response; any beyond its length."""
        return self._tokens(self.response_starts, self.longest_response)

    def _tokens(self, starts: Tensor, longest: int) -> Tensor:
        return (starts[:, None] + torch.arange(longest, device=starts.device)).clamp(max=self.num_tokens - 1)

    @cached_property
    def in_blocks(self) -> Tensor:
        """[T], where each token is in the blocks [G, P] and [B, Q], joined and flattened."""
        of_prompts = _within(self.prompt_lengths, self.longest_prompt).flatten()
        of_responses = _within(self.response_lengths, self.longest_response).flatten()
        return torch.cat([of_prompts, of_responses]).nonzero().flatten()

    def seen(self, window: int | None) -> Tensor:
        """[B, 1, Q, P + Q] bool, what the tokens of responses see; ``window``: at most so many, themselves included."""
        if window not in self._seen:  # the same in all layers of a kind
            device, lengths = self.prompt_of.device, self.prompt_lengths[self.prompt_of][:, None]
            queries = lengths + torch.arange(self.longest_response, device=device)
            of_prompts = torch.arange(self.longest_prompt, device=device).expand(len(lengths), -1)
            # Beyond its end a prompt's positions are those of no token.
            keys = torch.cat([of_prompts.masked_fill(of_prompts >= lengths, _NOWHERE), queries], dim=1)
            self._seen[window] = _sees(queries, keys, window)[:, None]
        return self._seen[window]

    @cached_property
    def bounds(self) -> tuple[Tensor, Tensor]:
        """[G + B + 1] int32 each, where the queries of each prompt and response start and end, and their keys in the
        order of :attr:`keys`."""
        queries = torch.cat([self.prompt_lengths, self.response_lengths])
        keys = torch.cat([self.prompt_lengths, self.prompt_lengths[self.prompt_of] + self.response_lengths])
        return _ends(queries), _ends(keys)

    @cached_property
    def keys(self) -> Tensor:
        """[N], the tokens that each prompt, and then each response, sees: its prompt's and its own."""
        before = self.prompt_lengths[self.prompt_of]
        lengths = before + self.response_lengths
        row = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
        place = torch.arange(len(row), device=row.device) - (lengths.cumsum(dim=0) - lengths)[row]
        in_prompt = self.prompt_starts[self.prompt_of][row] + place
        in_response = self.response_starts[row] + place - before[row]
        prompts = torch.arange(int(self.prompt_lengths.sum()), device=row.device)
        return torch.cat([prompts, torch.where(place < before[row], in_prompt, in_response)])

    @cached_property
    def longest(self) -> tuple[int, int]:
        """Most queries, and most keys, of a prompt or response."""
        both = self.prompt_lengths[self.prompt_of] + self.response_lengths
        return max(self.longest_prompt, self.longest_response), max(self.longest_prompt, int(both.max()))


_NOWHERE = torch.iinfo(torch.int64).max
"""The position of a key that nothing sees."""


def _within(lengths: Tensor, longest: int) -> Tensor:
    """[N, longest] bool, whether there is a token, for ``lengths [N]``."""
    return torch.arange(longest, device=lengths.device) < lengths[:, None]


def _sees(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """[B, Q, N] bool, whether a token at position ``queries [B, Q]`` sees the one at ``keys [B, N]``."""
    seen = keys[:, None] <= queries[:, :, None]
    return seen if window is None else seen & (keys[:, None] > queries[:, :, None] - window)


def _ends(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(dim=0)]).to(torch.int32)


def attend_in_blocks(
    attend: Attend, query: Tensor, key: Tensor, value: Tensor, shared: SharedPrompts, window: int | None
) -> Tensor:
    """Attention by two calls of ``attend``: all prompts, each padded to the longest, and all responses.

    Args:
        query: [1, H, T, D].
        key, value: [1, K, T, D].
        window: tokens that each one sees, itself included; None: all before it.

    Returns:
        [1, T, H, D].
    """
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
    q, k, v = (_blocks(states, shared.prompt_tokens) for states in (query, key, value))
    positions = torch.arange(shared.longest_prompt, device=query.device)[None]
    narrow = window is not None and shared.longest_prompt > window
    of_prompts = attend(q, k, v, _sees(positions, positions, window)[:, None] if narrow else None)
    rows = shared.prompt_of
    own = (_blocks(states, shared.response_tokens) for states in (query, key, value))
    q, own_keys, own_values = own
    keys = torch.cat([k.index_select(0, rows), own_keys], dim=2)
    values = torch.cat([v.index_select(0, rows), own_values], dim=2)
    of_responses = attend(q, keys, values, shared.seen(window))
    blocks = [states.transpose(1, 2).flatten(0, 1) for states in (of_prompts, of_responses)]
    return torch.cat(blocks).index_select(0, shared.in_blocks)[None]


def _blocks(states: Tensor, tokens: Tensor) -> Tensor:
    """[N, H, L, D], for ``states [T, H, D]`` and ``tokens [N, L]``."""
    blocks = states.index_select(0, tokens.flatten()).view(*tokens.shape, *states.shape[1:])
    return blocks.transpose(1, 2)


def shared_prompt_layout(batch: Batch) -> tuple[Layout, float]:
    """Each different prompt once, then all responses, and the share of the tokens of whole rows that this saves.

    Every row needs a prompt or a response.
    """
    is_response = batch.in_response
    prompts = [part.tolist() for part in batch.tokens[~is_response].split(batch.prompt_lengths.tolist())]
    # Sums of gradients depend on the order: that of the prompts must not depend on that of the rows.
    different = sorted({tuple(prompt) for prompt in prompts}, key=lambda prompt: (len(prompt), prompt))
    number = {prompt: place for place, prompt in enumerate(different)}
    device, responses = batch.tokens.device, batch.response_lengths
    prompt_of = torch.tensor([number[tuple(prompt)] for prompt in prompts], device=device)
    lengths = torch.tensor([len(prompt) for prompt in different], device=device)
    shared = SharedPrompts(lengths, responses, prompt_of)
    fillers = -shared.num_tokens % ROUND_TO
    # Where each token of the rows is read: at its place within the prompt or response that it belongs to.
    first = torch.stack([shared.prompt_starts[prompt_of], shared.response_starts], dim=1).flatten()
    sizes = torch.stack([batch.prompt_lengths, responses], dim=1).flatten()
    places = first.repeat_interleave(sizes) + positions_within(sizes)
    ids = torch.tensor([token for prompt in different for token in prompt], device=device, dtype=torch.int64)
    positions = [positions_within(lengths), positions_within(batch.lengths)[is_response]]
    inputs = {
        "input_ids": F.pad(torch.cat([ids, batch.tokens[is_response]]), (0, fillers))[None],
        "position_ids": F.pad(torch.cat(positions), (0, fillers))[None],
        "shared_prompts": shared,
    }
    num_whole = len(batch.tokens)
    return Layout(inputs, places), (num_whole - shared.num_tokens) / max(1, num_whole)
