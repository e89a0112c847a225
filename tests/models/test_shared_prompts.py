"""Prompts that are read once for several responses: the numbers are those of whole rows."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from verl.batch import Batch
from verl.models import attention
from verl.models.attention import packed_attention
from verl.models.shared_prompts import ROUND_TO, SharedPrompts, shared_prompt_layout

EPISODES = Batch.of([[11, 12], [21, 22, 23], [11, 12], [21, 22, 23]], [[31], [41, 42], [51], []])


def test_the_kernels_of_packed_rows_get_prompt_and_response_as_keys():
    shared = shared_prompt_layout(EPISODES)[0].inputs["shared_prompts"]
    queries, keys = shared.bounds
    assert queries.tolist() == [0, 2, 5, 6, 8, 9, 9] and queries.dtype == torch.int32
    assert keys.tolist() == [0, 2, 5, 8, 13, 16, 19] and shared.longest == (3, 5)
    assert shared.keys.tolist() == [0, 1, 2, 3, 4, 0, 1, 5, 2, 3, 4, 6, 7, 0, 1, 8, 2, 3, 4]


def varlen_reference(query, key, value, queries, keys, most_queries, most_keys, *, scale=None, window_size, **_):
    """What torch's kernel computes: row by row, the last query aligned with the last key."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(repeats, dim=1) for states in (key, value))
    outputs = []
    for (q0, q1), (k0, k1) in zip(pairwise(queries.tolist()), pairwise(keys.tolist()), strict=True):
        assert q1 - q0 <= most_queries and k1 - k0 <= most_keys
        distance = torch.arange(k1 - k0 - (q1 - q0), k1 - k0)[:, None] - torch.arange(k1 - k0)
        seen = (distance >= 0) & ((window_size[0] < 0) | (distance <= window_size[0]))
        scores = torch.einsum("qhd,khd->hqk", query[q0:q1], key[k0:k1]) * (scale or query.shape[-1] ** -0.5)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, value[k0:k1]))
    return torch.cat(outputs)


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("way", ["sdpa", "eager", "varlen"])
def test_every_way_attends_as_whole_rows_do(way: str, window: int | None, monkeypatch: pytest.MonkeyPatch):
    """Against each row computed by itself; four query heads share two of keys; in float64."""
    layout, _ = shared_prompt_layout(EPISODES)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, ROUND_TO, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)
    )
    if way == "varlen":
        monkeypatch.setattr(attention, "_has_varlen_kernel", lambda *_: True)
        monkeypatch.setattr(attention, "varlen_attn", varlen_reference)
    found, _ = packed_attention(
        nn.Module(), query, key, value, None, implementation="eager" if way == "eager" else "sdpa",
        sliding_window=window, shared_prompts=layout.inputs["shared_prompts"],
    )  # fmt: skip
    assert found.is_contiguous() and not found[0, 9:].any()
    for tokens in layout.places.split(EPISODES.lengths.tolist()):
        bounds = torch.tensor([0, len(tokens)], dtype=torch.int32)
        options = {"implementation": "sdpa", "sliding_window": window}
        states = (states[:, :, tokens] for states in (query, key, value))
        alone, _ = packed_attention(
            nn.Module(), *states, None, cu_seq_lens_q=bounds, max_length_q=len(tokens), **options
        )
        torch.testing.assert_close(found[0, tokens], alone[0], rtol=0, atol=1e-6 if way == "eager" else 1e-12)


def test_rows_without_prompt_or_response():
    shared = SharedPrompts(torch.tensor([0, 2]), torch.tensor([3, 0, 0]), torch.tensor([0, 1, 1]))
    states = torch.randn(1, 1, 5, 4, dtype=torch.float64)
    found, _ = packed_attention(nn.Module(), states, states, states, None, implementation="sdpa", shared_prompts=shared)
    assert found.isfinite().all()
    # The first token of the prompt, and that of the response without one, see themselves alone.
    assert torch.equal(found[0, [0, 2], 0], states[0, 0, [0, 2]])
