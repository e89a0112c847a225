"""Rollout engine that samples from the policy through ``transformers``, for models that vLLM does not support.

Legend: B = number of responses, R = maximum response length.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from verl.batch import Batch
from verl.config.rollout import SamplingConfig
from verl.models.fsdp import keep_dtype, keep_unsharded
from verl.models.policy import Policy
from verl.rank.calculator import RepresentationMetricsCalculator
from verl.rollout.base import RolloutSetup
from verl.rollout.decoding import StopStrings, decode
from verl.rollout.queue import EngineCapacity
from verl.rollout.requests import ResponseRequests
from vllm_patches.streams import uniforms


class HFRollout:
    """Engine that samples with the policy itself, returning log-probabilities and optionally rank metrics.

    Responses are decoded in batches of ``rollout.max_num_seqs``, and each batch runs until all its responses have
    finished. The policy's parameters are gathered once for all batches.
    """

    needs_weights = False
    weight_dtype = staticmethod(keep_dtype)

    def __init__(self, setup: RolloutSetup, policy: Policy) -> None:
        """Create an engine that samples from ``policy``, which this worker trains."""
        self.setup = setup
        self.policy = policy
        self.batch_size = setup.config.rollout.max_num_seqs
        self.max_response_length = setup.config.data.max_response_length
        self.calculator = None if setup.calculator is None else RepresentationMetricsCalculator(setup.calculator)
        strings = setup.stop_strings
        self.stops = StopStrings(setup.tokenizer, strings) if strings else None
        self.layers = [] if setup.calculator is None else setup.calculator.layers

    @property
    def capacity(self) -> EngineCapacity:
        """Unlimited capacity, because workers gather parameters collectively and must receive all requests at once."""
        return EngineCapacity(sys.maxsize, sys.maxsize)

    def begin(self) -> None:
        """Do nothing, because nothing is cached between calls."""

    def advance(self, requests: ResponseRequests, max_steps: int) -> tuple[Batch | None, int]:
        """Sample all responses to completion, ignoring ``max_steps``."""
        with self.policy.parameters.loaded(), keep_unsharded(self.policy.model):
            parts = [self._decode(requests, part) for part in self._batches(requests)]
        return Batch.join(parts) if parts else None, 0

    def cut(self) -> None:
        """Return None, because each call to :meth:`advance` samples complete responses."""

    def take_rank_metrics(self) -> None:
        """Return None, because this engine samples only single-turn responses."""

    def load_weights(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Do nothing, because the engine samples directly with the policy's weights."""

    def sleep(self) -> None:
        """Do nothing, because the engine keeps no memory between calls."""

    def _batches(self, requests: ResponseRequests) -> Iterator[Sequence[int]]:
        """Yield groups of requests to decode together. All requests in a group have the same sampling options."""
        rows: list[Sequence[int]] = [range(len(requests.rows))]
        if requests.overrides is not None:
            kinds: dict[SamplingConfig, list[int]] = {}
            for i in rows[0]:
                kinds.setdefault(requests.sampling_of(i), []).append(i)
            rows = list(kinds.values())
        for alike in rows:
            for start in range(0, len(alike), self.batch_size):
                yield alike[start : start + self.batch_size]

    def _draws(self, requests: ResponseRequests, part: Sequence[int]) -> Tensor:
        """Return uniform random numbers in [0, 1), [B, R] float64, from the same stream positions as in vLLM."""
        streams = [requests.streams[i] for i in part]
        ends = np.array([len(requests.prompt_ids[i]) for i in part])
        positions = ends[:, None] + np.arange(requests.max_response_length or self.max_response_length)
        return torch.from_numpy(uniforms(np.array(streams, dtype=np.uint64)[:, None], positions))

    def _decode(self, requests: ResponseRequests, part: Sequence[int]) -> Batch:
        """Decode a nonempty group of requests, which must have the same sampling options."""
        device, temperatures = self.setup.place.device_type, requests.temperatures
        prompts = [requests.prompt_ids[i] for i in part]
        input_ids, attention_mask = Batch.of(prompts, [[] for _ in part]).rows(self.setup.pad_token_id)
        decoded = decode(
            self.policy.model,
            input_ids.to(device),
            attention_mask.to(device),
            self._draws(requests, part).to(device),
            requests.sampling_of(part[0]),
            self.setup.end_tokens,
            self.layers,
            None if requests.max_response_length else self.stops,
            None if temperatures is None else torch.from_numpy(temperatures).to(device),
        )
        sizes = decoded.lengths.tolist()
        token_ids = [row[:size] for row, size in zip(decoded.token_ids.tolist(), sizes, strict=True)]
        there = torch.arange(decoded.logprobs.shape[1], device=device) < decoded.lengths[:, None]
        batch = Batch.of(
            prompts,
            token_ids,
            request=torch.tensor([requests.rows[i] for i in part]),
            rollout_logprobs=decoded.logprobs[there].cpu(),
            truncated=~decoded.ended.cpu(),
        )
        if decoded.states is not None and self.calculator is not None:
            states = [row[:size] for row, size in zip(decoded.states, sizes, strict=True)]
            batch.merge(self.calculator.measure(states).to("cpu"))
        return batch
