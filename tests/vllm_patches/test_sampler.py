"""Real engines on CPU that draw from streams: the right distribution, and the same tokens wherever a request runs."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.vllm_patches import engines
from tests.vllm_patches.conftest import Run, on_two_ranks
from tests.vllm_patches.engines import Asked
from vllm_patches.streams import substream

TABLE = [1.5, 0.3, 2.0, 0.7]
"""Temperatures of the first positions of a response."""


def named(stream: int, table: list[float] | None = None, **options: Any) -> dict[str, Any]:
    """Sampling options of a request that draws from ``stream``, with a ``table`` of temperatures."""
    extra = {"stream": stream} if table is None else {"stream": stream, "temperatures": table}
    return {"temperature": 1.0, "extra_args": extra} | options


def tokens(outcome: engines.Outcome) -> list[list[int]]:
    return [response.tokens for answer in outcome.answers for response in answer.responses]


@pytest.fixture(scope="module")
def asked(prompts: list[list[int]]) -> Asked:
    """Four responses to each prompt, some from truncated distributions, some at temperatures of their positions."""
    kinds: list[dict[str, Any]] = [{}, {"top_p": 0.8}, {"top_k": 20}, {"min_p": 0.05, "temperature": 0.7}]
    return [
        (prompt, named(substream(substream(3, uid), i), TABLE if uid % 3 == 1 else None, **kinds[uid % 4]))
        for uid, prompt in enumerate(prompts)
        for i in range(4)
    ]


@pytest.fixture(scope="module")
def drawn(inside: Run, qwen: Path, asked: Asked) -> list[list[int]]:
    """What they are, all in one batch."""
    found = tokens(inside(engines.from_streams, qwen, asked))
    assert len({tuple(response) for response in found}) == len(asked)
    return found


def test_draws_do_not_depend_on_the_batch(inside: Run, qwen: Path, asked: Asked, drawn):
    options = {"max_num_seqs": 3, "logprobs_mode": "raw_logprobs"}
    assert tokens(inside(engines.from_streams, qwen, asked[::-1], **options))[::-1] == drawn


def test_draws_do_not_depend_on_chunks_preemptions_and_caches(inside: Run, qwen: Path, asked: Asked, drawn):
    found = inside(engines.from_streams, qwen, asked, **engines.TIGHT)
    assert found.facts["preempted"] > 0 and max(answer.num_cached for answer in found.answers) > 0
    assert tokens(found) == drawn


@pytest.mark.nightly
def test_two_processes_of_vllms_own_draw_alike(outside: Run, qwen: Path, asked: Asked, drawn):
    assert tokens(outside(engines.from_streams, qwen, asked, tensor_parallel_size=2)) == drawn


@pytest.mark.nightly
def test_two_tensor_parallel_engines_draw_alike(qwen: Path, asked: Asked, drawn):
    assert list(map(tokens, on_two_ranks(engines.from_streams, qwen, asked))) == [drawn, drawn]


def test_draws_do_not_depend_on_the_engine_or_its_other_requests(inside: Run, qwen: Path, asked: Asked, drawn, prompts):
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 5, "top_p": 0.8}]
    others = [(prompt, kind) for prompt in prompts for kind in kinds]
    without = tokens(inside(engines.from_streams, qwen, others, additional_config={}))
    chance = [(prompts[0], {"temperature": 1.0})] * 2
    # Samples of one request draw from streams of their own, named as those of requests of their own.
    groups = [
        (prompt, given | {"n": 4, "extra_args": given["extra_args"] | {"stream": substream(3, uid)}})
        for uid, (prompt, given) in enumerate(asked[::4])
    ]
    found = tokens(inside(engines.from_streams, qwen, [*others, *asked, *chance], groups, asked[::2]))
    num, count = len(others), len(drawn)
    assert found[:num] == without and found[num : num + count] == drawn
    assert found[num + count] != found[num + count + 1]
    assert found[num + count + 2 :] == drawn + drawn[::2]


SIZE = 4000
DISTRIBUTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"top_p": 0.7},
    {"top_k": 10},
    {"min_p": 0.2},
    {"top_p": 0.9, "top_k": 30, "min_p": 0.05},
]


def test_draws_follow_the_distribution(inside: Run, qwen: Path, reference, prompts):
    prompt = prompts[0]
    with torch.no_grad():
        logits = reference(torch.tensor([prompt])).logits[0, -1].double()
    batches = [[(prompt, named(substream(8, i), max_tokens=1, **kind)) for i in range(SIZE)] for kind in DISTRIBUTIONS]
    answers = inside(engines.from_streams, qwen, *batches).answers
    for number, options in enumerate(DISTRIBUTIONS):
        expected = truncated(logits, **options)
        responses = [answer.responses[0] for answer in answers[number * SIZE :][:SIZE]]
        found = torch.tensor([response.tokens[0] for response in responses])
        # What training uses: log-probabilities of the distribution that was drawn from.
        logprobs = torch.tensor([response.states[0] for response in responses], dtype=torch.float64)
        torch.testing.assert_close(logprobs, expected.log()[found], rtol=0, atol=1e-4)
        counts = torch.bincount(found, minlength=len(expected)).double()
        assert counts[expected == 0].sum() == 0, options
        often = expected * SIZE >= 5
        counts = torch.cat([counts[often], counts[~often].sum()[None]])
        wanted = torch.cat([expected[often], expected[~often].sum()[None]]).clamp(min=1e-9) * SIZE
        freedom = len(wanted) - 1
        assert freedom >= 3, options
        # The square is within four standard deviations of its mean: the draws are fixed, and so is the outcome.
        assert ((counts - wanted) ** 2 / wanted).sum() < freedom + 4 * (2 * freedom) ** 0.5, options


def truncated(
    logits: torch.Tensor, temperature: float = 1.0, top_p: float = 1.0, top_k: int = -1, min_p: float = 0.0
) -> torch.Tensor:
    """The probabilities that vLLM samples from, in its order: temperature, min-p, top-k, top-p."""
    probabilities = (logits / temperature).softmax(dim=0)
    probabilities[probabilities < min_p * probabilities.max()] = 0
    ordered, order = probabilities.sort(descending=True)
    if top_k > 0:
        ordered[top_k:] = 0
    ordered = ordered / ordered.sum()
    ordered[ordered.cumsum(dim=0) - ordered >= top_p] = 0
    return torch.zeros_like(ordered).scatter(0, order, ordered / ordered.sum())
