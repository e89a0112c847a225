"""Interface of rollout engines, including their setup."""

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
    """Inputs for creating an engine, except for the policy."""

    config: PPOConfig
    place: WorkerPlace
    pad_token_id: int
    end_tokens: list[int]
    """Tokens that end a response and are included in it."""
    tokenizer: PreTrainedTokenizerBase
    stop_strings: list[str]
    """Strings that end a response as soon as its text, without special tokens, contains one of them. All tokens up to
    that point are kept, with their log-probabilities and hidden states."""

    @property
    def calculator(self) -> CalculatorConfig | None:
        """Options for measuring hidden states in the engine, or None to disable measurement."""
        calculator = self.config.calculator
        return calculator if calculator.measured_by("rollout") else None


class Rollout(Protocol):
    """Engine that samples responses inside a worker.

    Every response has its own random stream (:func:`verl.rollout.requests.response_stream`), which does not depend on
    the rest of the batch or on the worker that samples it.
    """

    @property
    def capacity(self) -> EngineCapacity:
        """Number of responses that the engine can sample at once."""

    def begin(self) -> None:
        """Prepare to sample, and drop cached prompts, so that results do not depend on earlier sampling."""

    def advance(self, requests: ResponseRequests, max_steps: int) -> tuple[Batch | None, int]:
        """Accept new requests and decode.

        Args:
            max_steps: Number of tokens per response after which to return. Engines may also run to completion.

        Returns:
            Newly finished responses, with their entries of ``requests.rows`` as ``request``, or None if there are
            none; and the number of requests that the engine has not started.
        """

    def cut(self) -> Batch | None:
        """Stop all unfinished responses and return them with their ``version``, or None if there are none."""

    def take_rank_metrics(self) -> Batch | None:
        """Return rank metrics and ``request`` of conversations that had turns since the last call or :meth:`cut`.

        Returns None if the engine does not measure rank metrics.
        """

    def load_weights(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Load the policy's weights, given as full (unsharded) parameters by name."""

    @property
    def weight_dtype(self) -> WeightDtype:
        """Precision in which the engine accepts each parameter."""

    def sleep(self) -> None:
        """Free memory that is not needed until the next ``load_weights``."""

    @property
    def needs_weights(self) -> bool:
        """Whether ``load_weights`` must be called before ``advance``."""
