"""Partial responses, stored as lists during sampling and in a ``Batch`` when they are finished, sent or saved."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter

import torch

from verl.batch import ENVIRONMENT, POLICY, RESPONSE_TOKEN, Batch

PER_TOKEN = {"source": torch.uint8, "rollout_logprobs": torch.float32, "version": torch.int32}
"""Names and types of the batch columns that a partial response stores as lists."""


@dataclass
class PartialResponse:
    """Partial response to a prompt. All lists except ``prompt_ids`` have one entry per response token."""

    prompt_ids: list[int]
    tokens: list[int] = field(default_factory=list)
    source: list[int] = field(default_factory=list)
    """Author of each token, ``POLICY`` or ``ENVIRONMENT``."""
    rollout_logprobs: list[float] | None = field(default_factory=list)
    """Log-probabilities, 0 for environment tokens, or None if the engine does not return them."""
    version: list[int] | None = None
    """Version of the weights that sampled each token, or None if responses are never interrupted."""

    @property
    def open_tokens(self) -> int:
        """Number of policy tokens in the unfinished turn at the end of the response."""
        return self.source[::-1].index(ENVIRONMENT) if ENVIRONMENT in self.source else len(self.source)

    def parts(self) -> list[tuple[int, list[int]]]:
        """Split the response into alternating spans of policy and environment tokens, each with its ``source``."""
        runs = groupby(zip(self.tokens, self.source, strict=True), key=itemgetter(1))
        return [(by, [token for token, _ in run]) for by, run in runs]

    def append(self, tokens: Sequence[int], by: int, logprobs: Sequence[float] | None, version: int | None) -> None:
        """Append tokens written by ``POLICY`` or ``ENVIRONMENT``, with ``logprobs`` and ``version`` if recorded."""
        self.tokens += tokens
        self.source += [by] * len(tokens)
        self.rollout_logprobs = None if logprobs is None else [*(self.rollout_logprobs or ()), *logprobs]
        self.version = None if version is None else [*(self.version or ()), *[version] * len(tokens)]

    def append_bridge(self, tokens: Sequence[int]) -> None:
        """Append environment tokens after a policy turn."""
        logprobs = None if self.rollout_logprobs is None else [0.0] * len(tokens)
        self.append(tokens, ENVIRONMENT, logprobs, None if self.version is None else self.version[-1])

    def replace_tokens(self, other: "PartialResponse") -> None:
        """Copy the response tokens of ``other`` and their per-token values."""
        self.tokens, self.source = other.tokens, other.source
        self.rollout_logprobs, self.version = other.rollout_logprobs, other.version

    def extend(self, other: "PartialResponse") -> None:
        """Append the response tokens of ``other`` and their per-token values."""
        self.tokens, self.source = self.tokens + other.tokens, self.source + other.source
        self.rollout_logprobs = [*(self.rollout_logprobs or ()), *(other.rollout_logprobs or ())]
        self.version = [*(self.version or ()), *(other.version or ())]

    def part(self, start: int, stop: int) -> "PartialResponse":
        """Return the response tokens from ``start`` to ``stop`` and their per-token values."""
        logprobs = None if self.rollout_logprobs is None else self.rollout_logprobs[start:stop]
        version = None if self.version is None else self.version[start:stop]
        return PartialResponse(self.prompt_ids, self.tokens[start:stop], self.source[start:stop], logprobs, version)


def to_batch(responses: Sequence[PartialResponse]) -> Batch:
    """Convert responses to a batch with the ``PER_TOKEN`` columns that are available for all of them."""
    columns = {}
    for name, dtype in PER_TOKEN.items():
        lists = [getattr(response, name) for response in responses]
        if None not in lists:
            columns[name] = torch.tensor([value for values in lists for value in values], dtype=dtype)
    return Batch.of([r.prompt_ids for r in responses], [r.tokens for r in responses]).fill(RESPONSE_TOKEN, **columns)


def from_batch(batch: Batch) -> list[PartialResponse]:
    """Convert a batch to partial responses. Without ``source``, all tokens are attributed to the policy."""
    sizes = batch.response_lengths.tolist()
    prompts = batch.tokens[~batch.in_response].split(batch.prompt_lengths.tolist())
    rows = zip(prompts, batch.response_tokens.split(sizes), strict=True)
    responses = [PartialResponse(p.tolist(), t.tolist(), [POLICY] * len(t), None, None) for p, t in rows]
    for name in PER_TOKEN:
        if name in batch:
            for response, values in zip(responses, getattr(batch, name).split(sizes), strict=True):
                setattr(response, name, values.tolist())
    return responses
