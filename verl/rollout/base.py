"""The interface of rollout engines: what they are made from and what they return."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verl.batch import Batch
from verl.config.calculator import CalculatorConfig
from verl.config.ppo import PPOConfig
from verl.models.fsdp import WeightDtype
from verl.rollout.queue import EngineCapacity
from verl.rollout.requests import ResponseRequests
from verl.utils.distributed import WorkerPlace


@dataclass(frozen=True)
class RolloutSetup:
    """Parts that an engine is made from, besides the policy."""

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

    Every response has its own random stream (:func:`verl.rollout.requests.response_stream`), which does not depend on
    the rest of the batch or on the worker that samples it.
    """

    @property
    def capacity(self) -> EngineCapacity:
        """Number of responses that it can sample at once."""

    def advance(self, requests: ResponseRequests, max_steps: int) -> tuple[Batch | None, int]:
        """Take further requests and decode.

        Args:
            max_steps: tokens of each response after which to return. An engine may continue until all have ended.

        Returns:
            The responses that have ended, whose ``request`` is their place among the requests, None if there are none;
            and the number of requests that the engine has not begun yet.
        """

    def cut(self) -> Batch | None:
        """Return the partial responses, with ``version``; None if there are none."""

    def take_rank_metrics(self) -> Batch | None:
        """Return the rank metrics, by ``request``, of the conversations with turns since the last call or cut.

        None if the engine measures none.
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
