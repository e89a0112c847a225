"""The interface of rollout engines: what they are made from and what they return.

Legend: B responses, P prompt length, R response length, L layers, D hidden width.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verl.config.ppo import PPOConfig
from verl.config.rollout import SamplingConfig
from verl.config.signal import CalculatorConfig
from verl.models.gather import WeightDtype
from verl.protocol import PromptBatch, RankMetrics, RolloutBatch
from verl.utils.distributed import WorkerPlace


@dataclass(frozen=True)
class RolloutSetup:
    """What an engine is made from, besides the policy."""

    config: PPOConfig
    place: WorkerPlace
    pad_token_id: int
    end_tokens: list[int]
    """Tokens that end a response; they belong to it."""
    tokenizer: PreTrainedTokenizerBase
    stop_strings: list[str]
    """Strings that end a response as soon as its text, without special tokens, holds one. All tokens up to then belong
    to it, as do their log-probabilities and hidden states."""

    @property
    def calculator(self) -> CalculatorConfig | None:
        """How the engine measures the hidden states of responses; None where it does not."""
        calculator = self.config.calculator
        return calculator if calculator.measured_by("rollout") else None


class Rollout(Protocol):
    """An engine that samples responses inside a worker.

    Every response has its own random stream, set by the seed, its prompt's ``uid`` and its index in the group. It does
    not depend on the rest of the batch or on the worker that samples it.
    """

    def generate(self, prompts: PromptBatch, sampling: SamplingConfig, seed: int) -> RolloutBatch:
        """Sample ``sampling.n`` responses per prompt; the responses of one prompt are neighbours."""

    def load_weights(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Load the policy's weights, given as whole parameters by name."""

    @property
    def weight_dtype(self) -> WeightDtype:
        """The precision in which the engine takes each parameter."""

    def sleep(self) -> None:
        """Free memory that is not needed until the next ``load_weights``."""

    @property
    def needs_weights(self) -> bool:
        """Whether ``load_weights`` must come before ``generate``."""


@dataclass(frozen=True)
class SampledResponse:
    """One response of T tokens."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    """Of each token, under the distribution it was sampled from."""
    truncated: bool
    """Cut at its maximal length."""
    measured: Mapping[str, Tensor] | None
    """A row of :class:`RankMetrics`; None where nothing is captured."""


def collect(
    prompts: PromptBatch, responses: Sequence[SampledResponse], n: int, max_response_length: int, pad_token_id: int
) -> RolloutBatch:
    """The batch of ``n`` responses per prompt, in the order of the prompts."""
    repeated = prompts.repeat_interleave(n)
    shape = (len(responses), max_response_length)
    token_ids = torch.full(shape, pad_token_id, dtype=torch.int64)
    response_mask = torch.zeros(shape, dtype=torch.int64)
    logprobs = torch.zeros(shape)
    for row, response in enumerate(responses):
        length = len(response.token_ids)
        token_ids[row, :length] = torch.tensor(response.token_ids)
        response_mask[row, :length] = 1
        logprobs[row, :length] = torch.tensor(response.logprobs)
    measured = [response.measured for response in responses if response.measured is not None]
    return RolloutBatch(
        input_ids=torch.cat([repeated.input_ids, token_ids], dim=1),
        attention_mask=torch.cat([repeated.attention_mask, response_mask], dim=1),
        response_mask=response_mask,
        rollout_logprobs=logprobs,
        group_ids=repeated.uid,
        truncated=torch.tensor([response.truncated for response in responses]),
        rank_metrics=RankMetrics.from_rows(measured, max_response_length)
        if measured
        else RankMetrics.none(len(responses)),
        batch_size=[len(responses)],
    )


def mix_seed(seed: int, uid: int) -> int:
    """A 31-bit seed that differs between neighbouring (seed, uid) pairs in all its bits (splitmix64's finaliser).

    Engines add a response's index within its group, so consecutive seeds would make groups share random streams.
    """
    z = (seed * 0x9E3779B97F4A7C15 + uid + 1) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (z ^ (z >> 31)) >> 33
