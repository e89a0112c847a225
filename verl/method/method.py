"""Base class for customizing the training step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verl.batch import Batch
from verl.config.errors import ConfigError
from verl.config.ppo import PPOConfig
from verl.data.prompt_record import PromptRecord
from verl.data.prompt_rows import render
from verl.data.records import read_chat
from verl.data.templates import opens_thought

Prompt = str | list[dict[str, Any]]
"""New content of a prompt's last message, or a complete chat."""


@dataclass(frozen=True)
class StepOutcome:
    """Results of a step for its G prompts, as they were before any edits by :meth:`Method.resample`."""

    step: int
    indices: list[int]
    """``uid`` of each of the G prompts, which is its index in the training data."""
    scores: list[float]
    """Mean score of the responses to each of the G prompts."""
    accuracy: list[float]
    """Fraction of correct responses to each of the G prompts, from 0 to 1."""
    metrics: Mapping[str, float]
    """Logged metrics of the step."""
    records: Sequence[PromptRecord] = ()
    """Records of the G prompts."""


class Method:
    """Base class with hooks for the training step; subclasses override the hooks that they customize.

    ``trainer.method=my/file.py:Shorter`` selects a subclass, and ``trainer.method_kwargs`` sets its arguments. The
    attributes below are set before ``__init__`` is called. All tensors are on the CPU. Example::

        class Shorter(Method):
            def __init__(self, weight=0.1):
                self.weight = weight

            def shape_rewards(self, batch, rewards):
                return rewards - self.weight * batch.response_lengths / self.max_response_length

    Subclasses with state must define ``state_dict`` and ``load_state_dict``, using JSON values and tensors.
    """

    config: PPOConfig
    """All options of the run."""
    tokenizer: PreTrainedTokenizerBase
    """Tokenizer of the policy."""
    prompts: Sequence[PromptRecord] = ()
    """Training data, indexed by ``uid``."""
    total_steps: int = 0
    """Number of steps in the run."""
    step: int = 0
    """Number of the current step, starting at 1."""
    candidates_per_prompt: int = 1
    """Number of candidates per prompt to pass to :meth:`choose_prompts`. Can be set in ``__init__``."""

    # --- Hooks, in the order of a step ---

    def choose_prompts(self, candidates: list[PromptRecord]) -> list[PromptRecord]:
        """Return the prompts for which to sample responses: 1 to ``num_prompts`` of the candidates, in any order.

        The remaining candidates are skipped until the next epoch. If fewer than ``num_prompts`` are returned, the batch
        is smaller, unless dynamic sampling fills it.
        """
        return candidates

    def sampling(self, records: list[PromptRecord]) -> Mapping[str, Any] | None:
        """Return sampling parameters for n responses to each of the G prompts, or None to use the ``rollout`` options.

        ``temperature``, ``top_p``, ``top_k`` and ``min_p`` are numbers or arrays that broadcast to [G, n].
        ``temperatures`` [T] replaces ``temperature`` with one value per token position; the last value also applies to
        all later positions. This hook requires ``rollout.seeded``. Training always uses ``rollout.temperature``; set
        ``rollout_is`` to correct for other sampling parameters.
        """
        return None

    def resample(self, batch: Batch, round: int) -> Mapping[int, PromptRecord]:
        """Return edited prompts to resample, based on the verified responses.

        Args:
            batch: Responses, with n consecutive responses per prompt (:meth:`by_prompt`).
            round: 1 for the original prompts, 2 for prompts that were edited once, and so on up to 7.

        Returns:
            Edited records (:meth:`edit_prompt`), keyed by the prompt's index in the batch, 0 to G - 1. The new
            responses are verified with the same ground truth and replace the old ones. Return {} to stop resampling.
        """
        return {}

    def learn_from(self, batch: Batch) -> Batch:
        """Return the batch to train on, which may include earlier responses, e.g. from a :class:`ReplayBuffer`.

        Select responses with ``batch[rows]`` and concatenate batches with ``Batch.join([...])``. The result may contain
        up to ``2 * max_learned`` responses, but at most ``max_learned`` with ``learned`` set. Responses without
        ``learned`` only contribute to group statistics. For earlier responses, the probability ratio is relative to the
        policy that sampled them (engine log-probabilities) or, with ``rollout_is``, to the current policy.
        """
        return batch

    def shape_rewards(self, batch: Batch, rewards: Tensor) -> Tensor:
        """Return the rewards for training, based on the original float64 ``rewards``, both of shape [B].

        This hook runs after the verifiers, reward model and overlong penalty have been applied, and before rank
        shaping, the KL penalty and advantages. The hook does not affect dynamic sampling or validation.
        """
        return rewards

    def after_step(self, outcome: StepOutcome) -> None:
        """Process the outcome of a completed step.

        If ``async_training.max_staleness`` is above 0, prompts for later steps have already been chosen.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state for checkpoints."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned."""

    # --- Helpers for subclasses ---

    @property
    def num_prompts(self) -> int:
        """Maximum number of prompts in a generation batch."""
        return self.config.data.prompts_per_batch

    @property
    def max_learned(self) -> int:
        """Maximum number of responses to train on per step."""
        return self.config.data.train_batch_size * self.config.rollout.n

    @property
    def max_response_length(self) -> int:
        """Maximum response length R in tokens."""
        return self.config.data.max_response_length

    def by_prompt(self, batch: Batch) -> list[Batch]:
        """Split a batch into batches of n consecutive responses, one batch per prompt."""
        return list(batch.split(self.config.rollout.n))

    def edit_prompt(self, record: PromptRecord, prompt: Prompt) -> PromptRecord:
        """Return ``record`` with a new prompt and the ``input_ids`` that ``data.template`` renders for it.

        Raises ``ConfigError`` if the prompt is invalid or incompatible with the template.
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
            ids = render(messages, self.config.data, self.tokenizer, record.tools)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        return replace(record, input_ids=ids, messages=messages, opens_thought=opens_thought(ids, self.tokenizer))
