"""The places of a training step that a study may change."""

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
"""The content of the last message of a prompt, in place of its own; or a whole chat."""


@dataclass(frozen=True)
class StepOutcome:
    """How the G prompts of a step went, as the data set has them: before :meth:`Method.resample` edited any."""

    step: int
    indices: list[int]
    """G, the ``uid`` of each prompt, its place in the training data."""
    scores: list[float]
    """G, mean score of the responses to each."""
    accuracy: list[float]
    """G, share of correct responses to each, 0 to 1."""
    metrics: Mapping[str, float]
    """The step's logged metrics."""
    records: Sequence[PromptRecord] = ()
    """G, the prompts themselves."""


class Method:
    """A training step with nothing changed; a subclass overrides the places that it changes.

    ``trainer.method=my/file.py:Mine`` names the subclass, whose ``__init__`` gets ``trainer.method_kwargs``. The
    attributes below are there before ``__init__`` is called. All tensors are on the CPU.

    A subclass with state defines ``state_dict`` and ``load_state_dict``. Checkpoints hold the state: what JSON holds,
    and tensors.
    """

    config: PPOConfig
    """All options of the run."""
    tokenizer: PreTrainedTokenizerBase
    """The policy's."""
    prompts: Sequence[PromptRecord] = ()
    """The training data, by ``uid``."""
    total_steps: int = 0
    """Steps of the whole run."""
    step: int = 0
    """The step in progress, from 1."""
    candidates_per_prompt: int = 1
    """How many candidates :meth:`choose_prompts` gets for each prompt that it chooses. Set it in ``__init__``."""

    # --- The places of a step, in their order ---

    def choose_prompts(self, candidates: list[PromptRecord]) -> list[PromptRecord]:
        """Choose the prompts to sample responses to, 1 to ``num_prompts`` of the candidates, in any order.

        The others come again in the next epoch, which has as many steps as batches of candidates. Fewer make a smaller
        batch, which dynamic sampling fills up with further ones.
        """
        return candidates

    def sampling(self, records: list[PromptRecord]) -> Mapping[str, Any] | None:
        """How the n responses to each of G prompts are sampled; None: as the options of ``rollout`` say.

        ``temperature``, ``top_p``, ``top_k`` and ``min_p`` are numbers, or arrays that broadcast to [G, n].
        ``temperatures`` [T] stands in for ``temperature``: entry t is that of a response's token t, the last one that
        of all later tokens. Needs ``rollout.seeded``; set ``rollout_is``, whose weights correct the difference
        to ``rollout.temperature``, which is learned.
        """
        return None

    def resample(self, batch: Batch, round: int) -> Mapping[int, PromptRecord]:
        """Return edited prompts to sample again, given the verdicts on the responses to them.

        Args:
            batch: the responses, n neighbours for each prompt (:meth:`by_prompt`).
            round: 1 for the prompts of the data set, 2 for those edited once, up to 7.

        Returns:
            Place of the prompt in the batch, 0 to G - 1 -> what :meth:`edit_prompt` makes of it. Its new responses
            replace those before, and are verified by the same ground truth. Nothing more is sampled after {}.
        """
        return {}

    def learn_from(self, batch: Batch) -> Batch:
        """Return the batch to learn from, of this step's responses and earlier ones, e.g. from a :class:`ReplayBuffer`.

        ``batch[rows]`` has some of the responses, ``Batch.join([...])`` puts batches together. Responses whose
        ``learned`` is false only enter the statistics of their group. At most ``max_learned`` may be learned from, and
        twice as many be returned. Those of earlier steps have the ratio to the policy that sampled them: their old
        log-probabilities are the engine's, or, with ``rollout_is``, the policy's.
        """
        return batch

    def change_rewards(self, batch: Batch, rewards: Tensor) -> Tensor:
        """Return the rewards to learn from, [B], given ``rewards [B]`` float64.

        They come after verifiers, reward model and overlong penalty, and before rank shaping, the KL divergence and
        advantages. Dynamic sampling and validation do not use them.
        """
        return rewards

    def after_step(self, outcome: StepOutcome) -> None:
        """React to the outcome of a step; called at its end.

        With ``async_training.max_staleness`` above 0, the prompts of later steps have been chosen by then.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state for checkpoints."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""

    # --- Help for subclasses ---

    @property
    def num_prompts(self) -> int:
        """G, the most prompts that are sampled together."""
        return self.config.data.prompts_per_batch

    @property
    def max_learned(self) -> int:
        """The most responses that a step can learn from."""
        return self.config.data.train_batch_size * self.config.rollout.n

    @property
    def max_response_length(self) -> int:
        """The most tokens of a response, R."""
        return self.config.data.max_response_length

    def by_prompt(self, batch: Batch) -> list[Batch]:
        """Split a batch into the responses to each prompt, which are n neighbours in it."""
        return list(batch.split(self.config.rollout.n))

    def edit_prompt(self, record: PromptRecord, prompt: Prompt) -> PromptRecord:
        """``record`` with another prompt in ``data.template``; its tokens are ``input_ids``.

        Raises:
            ConfigError: the prompt is not one, or does not fit the template.
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
