"""Prompts that are read once for several responses: the numbers are those of whole rows."""

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from verl.batch import Batch
from verl.models import attention
from verl.models.attention import packed_attention, packed_name
from verl.models.forward import LogprobForward
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


def forward_of(tiny_model: Path, share: bool, chunk: int) -> LogprobForward:
    name = packed_name("sdpa") if share else "sdpa"
    model = AutoModelForCausalLM.from_pretrained(tiny_model, attn_implementation=name, dtype=torch.float64)
    options = {"use_remove_padding": share, "shares_prompts": share, "logits_chunk_size": chunk}
    config = SimpleNamespace(
        **options, logits_dtype="auto", ulysses_sequence_parallel_size=1, param_dtype="float32", path=str(tiny_model)
    )
    return LogprobForward(model, config, "cpu")


@pytest.mark.parametrize("chunk", [0, 3])
def test_logprobs_and_gradients_are_those_of_padded_rows(tiny_model: Path, chunk: int):
    """Two groups whose rows alternate, one response empty; products in float64."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(5, 200, (length,), generator=generator).tolist() for length in (4, 6)]
    responses = [torch.randint(5, 200, (length,), generator=generator).tolist() for length in (7, 4, 1, 0, 5)]
    batch = Batch.of([prompts[row % 2] for row in range(5)], responses)
    weights = torch.randn(17, generator=generator, dtype=torch.float64)
    found = []
    for share in (False, True):
        forward = forward_of(tiny_model, share, chunk)
        scored = forward.logprobs(batch, 0.7, differentiable_entropy=True, layers=[1])
        (scored.logprobs * weights + 0.1 * scored.entropy).sum().backward()
        gradients = torch.cat([p.grad.flatten() for p in forward.model.parameters()])
        found.append((scored.logprobs, scored.entropy, torch.cat(scored.states), gradients))
    for padded, shared in zip(*found, strict=True):
        # Log-probabilities are rounded to float32.
        torch.testing.assert_close(shared, padded, rtol=1e-6, atol=1e-6)


def test_nothing_to_score_still_reaches_the_head(tiny_model: Path):
    forward = forward_of(tiny_model, share=True, chunk=3)
    scored = forward.logprobs(EPISODES, 1.0, torch.zeros(4, dtype=torch.bool))
    scored.logprobs.sum().backward()
    head = forward.model.get_output_embeddings().weight
    assert not scored.logprobs.any() and head.grad is not None and not head.grad.any()
