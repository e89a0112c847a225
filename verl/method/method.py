"""Base class for changes of a training step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verl.batch import Batch
from verl.config.errors import ConfigError
from verl.config.ppo import PPOConfig
from verl.data.prompt_rows import PromptRecord, render
from verl.data.records import read_chat
from verl.data.templates import opens_thought

Prompt = str | list[dict[str, Any]]
"""New content for the last message of a prompt, or a whole chat."""


@dataclass(frozen=True)
class StepOutcome:
    """Results of the G prompts of a step, before :meth:`Method.resample` edited any."""

    step: int
    indices: list[int]
    """G, ``uid`` of each prompt, its index in the training data."""
    scores: list[float]
    """G, mean score of the responses to each prompt."""
    accuracy: list[float]
    """G, share of correct responses to each prompt, 0 to 1."""
    metrics: Mapping[str, float]
    """The step's logged metrics."""
    records: Sequence[PromptRecord] = ()
    """G prompts."""


class Method:
    """A training step; subclasses override the hooks whose behavior they change.

    ``trainer.method=my/file.py:Shorter`` selects a subclass; its arguments are ``trainer.method_kwargs``. The
    attributes below are set before ``__init__`` is called. All tensors are on the CPU. Example::

        class Shorter(Method):
            def __init__(self, weight=0.1):
                self.weight = weight

            def shape_rewards(self, batch, rewards):
                return rewards - self.weight * batch.response_lengths / self.max_response_length

    A subclass with state defines ``state_dict`` and ``load_state_dict``; the state is JSON values and tensors.
    """

    config: PPOConfig
    """All options of the run."""
    tokenizer: PreTrainedTokenizerBase
    """The policy's tokenizer."""
    prompts: Sequence[PromptRecord] = ()
    """The training data, indexed by ``uid``."""
    total_steps: int = 0
    """Number of steps of the run."""
    step: int = 0
    """The step in progress, from 1."""
    candidates_per_prompt: int = 1
    """Number of candidates that :meth:`choose_prompts` gets per prompt. Set it in ``__init__``."""

    # --- Hooks, in the order of a step ---

    def choose_prompts(self, candidates: list[PromptRecord]) -> list[PromptRecord]:
        """Return the prompts to sample responses to, 1 to ``num_prompts`` of the candidates, in any order.

        The remaining candidates are skipped until the next epoch. If fewer than ``num_prompts`` are returned, the batch
        is smaller; dynamic sampling fills it up.
        """
        return candidates

    def sampling(self, records: list[PromptRecord]) -> Mapping[str, Any] | None:
        """Return sampling parameters for the n responses to each of G prompts; None: use the options of ``rollout``.

        ``temperature``, ``top_p``, ``top_k`` and ``min_p`` are numbers, or arrays that broadcast to [G, n].
        ``temperatures`` [T] replaces ``temperature`` by one per token; the last entry applies to all later tokens.
        Requires ``rollout.seeded``. Set ``rollout_is`` to correct for the difference to ``rollout.temperature``,
        at which the policy is trained.
        """
        return None

    def resample(self, batch: Batch, round: int) -> Mapping[int, PromptRecord]:
        """Return edited prompts to sample again, given verified responses.

        Args:
            batch: the responses, n consecutive ones per prompt (:meth:`by_prompt`).
            round: 1 for the prompts of the data set, 2 for prompts edited once, up to 7.

        Returns:
            Index of a prompt in the batch, 0 to G - 1 -> its edited record (:meth:`edit_prompt`). New responses are
            verified with the same ground truth and replace the old ones. {} ends the rounds.
        """
        return {}

    def learn_from(self, batch: Batch) -> Batch:
        """Return the batch to learn from: responses of this step and, e.g. from a :class:`ReplayBuffer`, earlier ones.

        Select responses with ``batch[rows]`` and concatenate batches with ``Batch.join([...])``. At most
        ``max_learned`` responses may have ``learned`` set; up to as many others only enter the statistics of their
        group. The policy ratio of earlier responses is relative to the policy that sampled them: their old
        log-probabilities are the engine's or, with ``rollout_is``, the policy's.
        """
        return batch

    def shape_rewards(self, batch: Batch, rewards: Tensor) -> Tensor:
        """Return the rewards to learn from, [B], given ``rewards [B]`` float64.

        Called after verifiers, reward model and overlong penalty, and before rank shaping, the KL divergence and
        advantages. Does not affect dynamic sampling and validation.
        """
        return rewards

    def after_step(self, outcome: StepOutcome) -> None:
        """Process the outcome of a finished step.

        With ``async_training.max_staleness`` above 0, prompts of later steps have already been chosen.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state for checkpoints."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned."""

    # --- Helpers for subclasses ---

    @property
    def num_prompts(self) -> int:
        """Maximum number of prompts that are sampled together."""
        return self.config.data.prompts_per_batch

    @property
    def max_learned(self) -> int:
        """Maximum number of responses that a step learns from."""
        return self.config.data.train_batch_size * self.config.rollout.n

    @property
    def max_response_length(self) -> int:
        """Maximum number of tokens in a response, R."""
        return self.config.data.max_response_length

    def by_prompt(self, batch: Batch) -> list[Batch]:
        """Split a batch into the n consecutive responses to each prompt."""
        return list(batch.split(self.config.rollout.n))

    def edit_prompt(self, record: PromptRecord, prompt: Prompt) -> PromptRecord:
        """Return ``record`` with another prompt, rendered with ``data.template``; its tokens are ``input_ids``.

        Raises:
            ConfigError: the prompt is invalid, or does not fit the template.
        """
        where = f"trainer.method={self.config.trainer.method!r}: its prompt for {record.uid}"
        if isinstance(prompt, str):
            prompt = [*record.messages[:-1], record.messages[-1] | {"content": prompt}]
        try:
            messages = read_chat(prompt, where, "messages", "trainer.method")
        except ConfigError as error:
            must = "must be text, or a list of messages with role and content, and not empty"
            raise ConfigError(f"{where} is {str(prompt):.80}; it {must}") from error
        try:
            ids = render(messages, self.config.data, self.tokenizer)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        return replace(record, input_ids=ids, messages=messages, opens_thought=opens_thought(ids, self.tokenizer))
