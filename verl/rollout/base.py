"""The interface of rollout engines: what they are made from and what they return.

Legend: B responses, P prompt length, R response length, L layers, D hidden width.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verl.config.calculator import CalculatorConfig
from verl.config.ppo import PPOConfig
from verl.models.gather import WeightDtype
from verl.protocol import PromptBatch, RankMetrics, RolloutBatch
from verl.rollout.queue import EngineRoom
from verl.rollout.requests import ResponseRequests
from verl.utils.distributed import WorkerPlace
from vllm_patches.streams import substream


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


@dataclass(frozen=True)
class FinishedResponses:
    """F responses of an engine that have ended and been measured, of T tokens together."""

    rows: list[int]
    """The place of each in the batch."""
    lengths: Tensor
    """[F] int64, tokens of each."""
    token_ids: Tensor
    """[T] int32, those of the first response, then of the second, and so on."""
    logprobs: Tensor
    """[T] float32, of each token, under the distribution it was sampled from."""
    truncated: Tensor
    """[F] bool, cut at the maximal length."""
    rank_metrics: RankMetrics | None
    """None where nothing is captured, or F is 0."""
    num_waiting: int
    """Requests that the engine has not begun yet."""
    num_ended: int
    """Responses that have ended since the last reply. Those that are still measured come with a later one."""

    @classmethod
    def of(
        cls,
        responses: Mapping[int, SampledResponse],
        max_response_length: int,
        num_waiting: int = 0,
        num_ended: int | None = None,
    ) -> "FinishedResponses":
        """The responses by their place in the batch; ``num_ended`` is their number, unless given."""
        found = list(responses.values())
        measured = [response.measured for response in found if response.measured is not None]
        return cls(
            rows=list(responses),
            lengths=torch.tensor([len(response.token_ids) for response in found], dtype=torch.int64),
            token_ids=torch.tensor([token for response in found for token in response.token_ids], dtype=torch.int32),
            logprobs=torch.tensor([value for response in found for value in response.logprobs], dtype=torch.float32),
            truncated=torch.tensor([response.truncated for response in found], dtype=torch.bool),
            rank_metrics=RankMetrics.from_rows(measured, max_response_length) if measured else None,
            num_waiting=num_waiting,
            num_ended=len(found) if num_ended is None else num_ended,
        )

    def tokens(self) -> list[list[int]]:
        """The tokens of each response."""
        return [part.tolist() for part in self.token_ids.split(self.lengths.tolist())]


class Rollout(Protocol):
    """An engine that samples responses inside a worker.

    Every response has its own random stream, set by the seed, its prompt's ``uid`` and its index in the group. It does
    not depend on the rest of the batch or on the worker that samples it.
    """

    @property
    def room(self) -> EngineRoom:
        """How much it can sample at once."""

    def advance(self, requests: ResponseRequests, max_steps: int) -> FinishedResponses:
        """Take further requests, decode, and return the responses that have ended.

        Args:
            max_steps: tokens of each response after which to return. An engine may go on until all have ended.
        """

    def load_weights(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Load the policy's weights, given as whole parameters by name."""

    @property
    def weight_dtype(self) -> WeightDtype:
        """The precision in which the engine takes each parameter."""

    def sleep(self) -> None:
        """Free memory that is not needed until the next ``load_weights``."""

    @property
    def needs_weights(self) -> bool:
        """Whether ``load_weights`` must come before ``advance``."""


def collect(
    prompts: PromptBatch,
    parts: Sequence[FinishedResponses],
    n: int,
    max_response_length: int,
    pad_token_id: int,
) -> RolloutBatch:
    """The batch of ``n`` responses per prompt, in the order of the prompts; each is in one of the parts."""
    repeated = prompts.repeat_interleave(n)
    rows = torch.tensor([row for part in parts for row in part.rows], dtype=torch.int64)
    assert torch.equal(rows.sort().values, torch.arange(len(repeated))), "each response is sampled once"
    order, lengths = rows.argsort(), torch.cat([part.lengths for part in parts])

    def in_order(values: list[Tensor]) -> Tensor:
        """Values of all tokens, response by response."""
        pieces = torch.cat(values).split(lengths.tolist())
        return torch.cat([pieces[i] for i in order.tolist()])

    mask = torch.arange(max_response_length) < lengths[order][:, None]
    responses = torch.full(mask.shape, pad_token_id, dtype=torch.int64)
    responses[mask] = in_order([part.token_ids for part in parts]).long()
    logprobs = torch.zeros(mask.shape)
    logprobs[mask] = in_order([part.logprobs for part in parts])
    measured: list[Any] = [part.rank_metrics for part in parts if part.rank_metrics is not None]
    rank_metrics: Any = torch.cat(measured)[order] if measured else RankMetrics.none(len(rows))
    return RolloutBatch(
        input_ids=torch.cat([repeated.input_ids, responses], dim=1),
        attention_mask=torch.cat([repeated.attention_mask, mask.long()], dim=1),
        response_mask=mask.long(),
        rollout_logprobs=logprobs,
        group_ids=repeated.uid,
        truncated=torch.cat([part.truncated for part in parts])[order],
        rank_metrics=rank_metrics,
        batch_size=[len(rows)],
    )


def prompt_stream(seed: int, uid: int) -> int:
    """The stream of random numbers of a prompt; response i of its group has ``substream(prompt_stream(...), i)``.

    One number of a response's stream decides each of its tokens: that at the token's position in the sequence, which
    starts with the prompt.
    """
    return substream(substream(0, seed), uid)
