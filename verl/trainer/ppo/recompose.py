"""The batch that a step learns from, as a user's class makes it of the step's responses and earlier ones.

Legend: B responses, R response columns.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from verl.config.errors import ConfigError
from verl.config.ppo import PPOConfig
from verl.data.prompt_rows import PromptRecord
from verl.data.prompts import TokenizedPrompts
from verl.data.replay import ReplayBuffer, Responses, StepBatch
from verl.protocol import PromptBatch
from verl.trainer.ppo.sampled import Sampled, finished
from verl.utils.own import OwnObject


class Recomposer:
    """The class that ``algorithm.recompose`` names, and its buffer.

    Raises:
        ConfigError: it cannot be loaded or made, or lacks the method ``recompose``.
    """

    def __init__(self, config: PPOConfig, total_steps: int, originals: Sequence[PromptRecord]) -> None:
        """``originals``: the data set's prompts, by ``uid``."""
        algorithm = config.algorithm
        assert algorithm.recompose is not None, "made only where a class is named"
        self.own = OwnObject(
            algorithm.recompose, "algorithm.recompose", algorithm.recompose_kwargs, {"recompose": 1, "update?": 1}
        )
        self.buffer = ReplayBuffer(algorithm.recompose_buffer)
        self.total_steps = total_steps
        self.originals = originals
        self.max_learned = config.data.train_batch_size * config.rollout.n
        self.shape = (config.max_sequence_length, config.data.max_response_length)

    def recompose(self, sampled: Sampled, step: int) -> tuple[Sampled, dict[str, float]]:
        """What ``step`` learns from, each response as a prompt of its own, and metrics.

        Raises:
            ConfigError: the class raised, or returned something else than so many responses.
        """
        batch = StepBatch(step, self.total_steps, _responses(sampled, step), self.buffer, self.max_learned)
        found = self.own.call("recompose", batch)
        self._check(found, step)
        metrics = {
            "recompose/responses": float(len(found)),
            "recompose/learned": float(found.learned.sum()),
            "recompose/replayed": float((found.steps < step).sum()),
            "recompose/buffer": float(len(self.buffer)),
        }
        if (found.steps < step).any():
            metrics["recompose/age/mean"] = (step - found.steps[found.steps < step]).double().mean().item()
        return _sampled(found, step), metrics

    def buffer_state(self) -> Any:
        """What the buffer holds, as JSON."""
        return self.buffer.state(self.originals)

    def load_buffer(self, state: Any) -> None:
        """Restore :meth:`buffer_state`; from the checkpoint of a run without a buffer, an empty one."""
        self.buffer.load_state(state, self.originals, self.shape)

    def _check(self, found: Any, step: int) -> None:
        if not isinstance(found, Responses):
            expected = "a verl.data.replay.Responses, such as batch.responses[places]"
            raise ConfigError(f"{self.own.where}: its recompose returned {str(found):.80}; it must return {expected}")
        most = self.max_learned
        learned = int(found.learned.sum())
        if not 1 <= len(found) <= 2 * most or learned > most:
            raise ConfigError(
                f"{self.own.where}: its recompose returned {len(found)} responses, {learned} of them to learn from; "
                f"must be from 1 to {2 * most}, and at most {most} to learn from"
            )
        if (found.steps > step).any() or (found.steps < 1).any():
            raise ConfigError(f"{self.own.where}: its recompose returned responses of steps that are not 1 to {step}")


def behaviour_logprobs(current: Tensor, rollout_logprobs: Tensor, replayed: Tensor | None) -> Tensor:
    """The old log-probabilities [B, R] that the loss compares with.

    Of this step's responses, those of the policy, ``current`` [B, R]. Those of ``replayed`` [B] bool come from an
    earlier policy: what they were sampled with makes the ratio of the loss the importance ratio to that policy.
    """
    return current if replayed is None else torch.where(replayed[:, None], rollout_logprobs, current)


def _responses(sampled: Sampled, step: int) -> Responses:
    n = len(sampled.texts) // len(sampled.prompts.records)
    records = [record for record in sampled.prompts.records for _ in range(n)]
    # A prompt that comes again in a later step makes another group.
    group_ids = (step << 32) + torch.arange(len(sampled.prompts.records)).repeat_interleave(n)
    steps = torch.full((len(records),), step)
    rollout = sampled.rollout.replace(group_ids=group_ids)
    return Responses(rollout, records, sampled.texts, sampled.pending.result(), steps, sampled.learned.clone())


def _sampled(found: Responses, step: int) -> Sampled:
    rollout = found.rollout
    columns = rollout.input_ids.shape[1] - rollout.response_mask.shape[1]
    uid = torch.tensor([record.uid for record in found.records])
    tokens = PromptBatch(
        rollout.input_ids[:, :columns], rollout.attention_mask[:, :columns], uid, batch_size=[len(found)]
    )
    prompts = TokenizedPrompts(found.records, tokens)
    sampled = Sampled(prompts, rollout, found.texts, finished(found.results), found.learned)
    return replace(sampled, replayed=found.steps < step)
