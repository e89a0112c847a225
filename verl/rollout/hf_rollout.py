"""The policy as its own rollout engine, through ``transformers``: for models that vLLM does not support.

Legend: B responses, R longest response.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from verl.config.rollout import SamplingConfig
from verl.models.fsdp import keep_unsharded
from verl.models.gather import as_it_is
from verl.models.policy import Policy
from verl.rank.calculator import RepresentationMetricsCalculator
from verl.rollout.base import FinishedResponses, RolloutSetup, SampledResponse, prompt_stream
from verl.rollout.decoding import Decoded, StopStrings, decode
from verl.rollout.queue import EngineRoom
from verl.rollout.requests import ResponseRequests
from vllm_patches.streams import substream, uniforms


class HFRollout:
    """Samples responses with log-probabilities, and measures their hidden states if the setup says so.

    Decodes batches of ``rollout.max_num_seqs`` responses, each batch until its last response has ended. The policy's
    parameters are gathered once for all batches.
    """

    needs_weights = False
    weight_dtype = staticmethod(as_it_is)

    def __init__(self, setup: RolloutSetup, policy: Policy) -> None:
        """``policy``: the one that this worker trains."""
        self.setup = setup
        self.policy = policy
        self.batch_size = setup.config.rollout.max_num_seqs
        self.max_response_length = setup.config.data.max_response_length
        self.calculator = None if setup.calculator is None else RepresentationMetricsCalculator(setup.calculator)
        strings = setup.stop_strings
        self.stops = StopStrings(setup.tokenizer, strings) if strings else None
        self.layers = [] if setup.calculator is None else setup.calculator.layers

    @property
    def room(self) -> EngineRoom:
        """Without end: its workers gather the parameters together, so each is given all its requests at once."""
        return EngineRoom(sys.maxsize, sys.maxsize)

    def advance(self, requests: ResponseRequests, max_steps: int) -> FinishedResponses:
        """Sample all of the requests, however many steps that takes."""
        finished: dict[int, SampledResponse] = {}
        with self.policy.parameters.loaded(), keep_unsharded(self.policy.model):
            for part in self._batches(requests):
                responses = self._decode(requests, part)
                finished |= zip([requests.rows[i] for i in part], responses, strict=True)
        return FinishedResponses.of(finished, self.max_response_length)

    def load_weights(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Do nothing: the engine uses the policy's own weights."""

    def sleep(self) -> None:
        """Do nothing: the engine holds no memory between calls."""

    def _batches(self, requests: ResponseRequests) -> Iterator[Sequence[int]]:
        """The requests that are decoded together: neighbours, or those that are sampled alike."""
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
        """[B, R] float64, uniform in [0, 1): of each row's stream, from the end of its prompt on, as vLLM draws."""
        streams = [substream(prompt_stream(requests.seed, requests.uids[i]), requests.places[i]) for i in part]
        ends = np.array([len(requests.prompt_ids[i]) for i in part])
        positions = ends[:, None] + np.arange(self.max_response_length)
        return torch.from_numpy(uniforms(np.array(streams, dtype=np.uint64)[:, None], positions))

    def _decode(self, requests: ResponseRequests, part: Sequence[int]) -> list[SampledResponse]:
        """Decode ``part``, which is not empty and sampled alike but for tables of temperatures."""
        device = self.setup.place.device_type
        prompts, tables = [requests.prompt_ids[i] for i in part], None
        if requests.temperatures is not None:
            tables = torch.from_numpy(np.stack([requests.temperatures[i] for i in part])).to(device)
        longest = max(len(ids) for ids in prompts)
        padding = [[self.setup.pad_token_id] * (longest - len(ids)) for ids in prompts]
        input_ids = torch.tensor([pads + ids for pads, ids in zip(padding, prompts, strict=True)], device=device)
        lengths = torch.tensor([len(ids) for ids in prompts], device=device)
        attention_mask = (torch.arange(longest, device=device) >= longest - lengths[:, None]).long()
        decoded = decode(
            self.policy.model,
            input_ids,
            attention_mask,
            self._draws(requests, part).to(device),
            requests.sampling_of(part[0]),
            self.setup.end_tokens,
            self.layers,
            self.stops,
            tables,
        )
        sizes = decoded.lengths.tolist()
        measured = self._measure(decoded, sizes)
        fields = (decoded.token_ids.tolist(), decoded.logprobs.tolist(), decoded.ended.tolist(), sizes, measured)
        return [
            SampledResponse(token_ids[:length], logprobs[:length], not ended, metrics)
            for token_ids, logprobs, ended, length, metrics in zip(*fields, strict=True)
        ]

    def _measure(self, decoded: Decoded, lengths: list[int]) -> Sequence[Mapping[str, Tensor] | None]:
        if decoded.states is None or self.calculator is None:
            return [None] * len(lengths)
        states = [row[:length] for row, length in zip(decoded.states, lengths, strict=True)]
        return self.calculator.measure(states).to_rows()
