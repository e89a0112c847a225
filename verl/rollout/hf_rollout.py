"""The policy as its own rollout engine, through ``transformers``: for models that vLLM does not support.

Legend: B responses, R longest response.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from verl.config.rollout import SamplingConfig
from verl.models.fsdp import keep_unsharded
from verl.models.gather import as_it_is
from verl.models.policy import Policy
from verl.protocol import PromptBatch, RolloutBatch
from verl.rank.calculator import RepresentationMetricsCalculator
from verl.rollout.base import RolloutSetup, SampledResponse, collect, mix_seed
from verl.rollout.decoding import Decoded, StopStrings, decode


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

    def generate(self, prompts: PromptBatch, sampling: SamplingConfig, seed: int) -> RolloutBatch:
        """Sample ``sampling.n`` responses per prompt; the responses of one prompt are neighbours."""
        rows = prompts.repeat_interleave(sampling.n)
        draws = self._draws(rows, sampling, seed)
        responses: list[SampledResponse] = []
        with self.policy.parameters.loaded(), keep_unsharded(self.policy.model):
            for start in range(0, len(rows), self.batch_size):
                part = slice(start, start + self.batch_size)
                responses += self._decode(rows[part], draws[part], sampling)
        return collect(prompts, responses, sampling.n, self.max_response_length, self.setup.pad_token_id)

    def load_weights(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Do nothing: the engine uses the policy's own weights."""

    def sleep(self) -> None:
        """Do nothing: the engine holds no memory between calls."""

    def _draws(self, rows: PromptBatch, sampling: SamplingConfig, seed: int) -> Tensor:
        """[B, R] float64, uniform in [0, 1), each row from its own random stream; the same on every device."""
        draws = torch.empty(len(rows), self.max_response_length, dtype=torch.float64)
        for row, uid in enumerate(rows.uid.tolist()):
            generator = torch.Generator().manual_seed(mix_seed(seed, uid) + row % sampling.n)
            draws[row].uniform_(generator=generator)
        return draws

    def _decode(self, rows: PromptBatch, draws: Tensor, sampling: SamplingConfig) -> list[SampledResponse]:
        first = int(rows.attention_mask.any(dim=0).nonzero()[0])
        device = self.setup.place.device_type
        input_ids, attention_mask = (t[:, first:].to(device) for t in (rows.input_ids, rows.attention_mask))
        decoded = decode(
            self.policy.model,
            input_ids,
            attention_mask,
            draws,
            sampling,
            self.setup.end_tokens,
            self.layers,
            self.stops,
        )
        lengths = decoded.lengths.tolist()
        measured = self._measure(decoded, lengths)
        fields = (decoded.token_ids.tolist(), decoded.logprobs.tolist(), decoded.ended.tolist(), lengths, measured)
        return [
            SampledResponse(token_ids[:length], logprobs[:length], not ended, metrics)
            for token_ids, logprobs, ended, length, metrics in zip(*fields, strict=True)
        ]

    def _measure(self, decoded: Decoded, lengths: list[int]) -> Sequence[Mapping[str, Tensor] | None]:
        if decoded.states is None or self.calculator is None:
            return [None] * len(lengths)
        states = [row[:length] for row, length in zip(decoded.states, lengths, strict=True)]
        return self.calculator.measure(states).to_rows()
