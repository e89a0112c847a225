"""Scheduler of partial rollouts (``async_training.partial_rollout``).

A step samples all open groups, so that engines never wait for the longest responses in a batch. It trains on the oldest
complete groups, and partial responses are resumed after the update.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from verl.batch import Batch
from verl.data.prompt_record import PromptRecord
from verl.rollout.environments.conversations import add_rank_metrics
from verl.rollout.multi_turn import begin_conversations
from verl.rollout.requests import ResponseRequests
from verl.trainer.logging.rollout_metrics import data_sources, groups_that_differ, verdict_metrics
from verl.trainer.logging.speed import PhaseTimer, Work
from verl.trainer.ppo.open_groups import OpenGroups, append
from verl.trainer.ppo.rollout_scheduler import (
    MAX_FRUITLESS_BATCHES,
    RolloutScheduler,
    SampledStep,
    has_turns,
    nothing_to_learn,
)
from verl.trainer.ppo.verification import fill_verdicts

KEPT = ("records", "group", "step", "stream")
"""Columns that are restored for carried-over responses, because the engines do not return them. ``step`` is the step of
admission, and ``stream`` [B] int64 is the random stream (:func:`verl.rollout.requests.response_stream`)."""


@dataclass(eq=False)
class PartialRolloutScheduler(RolloutScheduler):
    """Scheduler that carries groups over from step to step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        config = self.config
        self.groups = OpenGroups(config.rollout.n, config.data.train_batch_size, config.carried_steps)

    def state(self) -> dict[str, Any]:
        """Return the open groups, as JSON values and tensors."""
        return self.groups.state(self.prompts)

    def load_state(self, state: dict[str, Any]) -> None:
        self.groups.load_state(state, self.prompts)

    def sample(
        self, prompts: Iterator[list[PromptRecord]], step: int, timer: PhaseTimer, version: int | None = None
    ) -> SampledStep:
        """Return the oldest complete groups after replacing groups that ``algorithm.filter_groups`` removes."""
        groups, filtering = self.groups, self.config.algorithm.filter_groups
        known, admitted = set(groups.complete()), groups.num_admitted
        version = step - 1 if version is None else version
        filtered, reread, num_compared = list[Batch](), 0.0, 0
        while True:
            # 1. Admit groups and run the engines until enough groups are complete.
            self._admit(prompts, step)
            reread += self._advance(groups.open, step, version, timer) if groups.open is not None else 0.0
            if not filtering.enable:
                break
            # 2. Filter the groups that were completed in this step.
            new = [group for group in groups.complete() if group not in known]
            known |= set(new)
            num_compared += len(new)
            with timer.phase("reward"):
                filtered += self._filter(new)
            if self._must_end(num_compared):
                break
        with timer.phase("gen"):
            self.policy.finish_generation()
        sampled = self._filled(groups.take(groups.complete()[: groups.batch_size]), filtered)
        metrics = sampled.metrics | {
            "async/admitted": float(groups.num_admitted - admitted),
            "async/outstanding": float(len(groups.outstanding())),
            "async/carried_over_tokens": 0.0 if groups.open is None else float(groups.open.response_lengths.sum()),
            "async/reread_tokens": reread,
        }
        batch = sampled.batch.fill(step=torch.full((len(sampled.batch),), step))
        return sampled._replace(batch=batch.widened(self.config.data.max_response_length), metrics=metrics)

    def _admit(self, prompts: Iterator[list[PromptRecord]], step: int) -> None:
        """Admit groups up to the limit of outstanding groups, but no more than the remaining steps can use."""
        groups, num_batches = self.groups, min(self.config.carried_steps + 1, self.total_steps + 1 - step)
        while (missing := num_batches * groups.batch_size - len(groups.outstanding())) > 0:
            records = groups.waiting or self.method.choose_prompts(next(prompts))
            groups.admit(records[:missing], step, self.config.seed, self.policy.conversations is not None)
            groups.waiting = records[missing:]

    def _advance(self, before: Batch, step: int, version: int, timer: PhaseTimer) -> float:
        """Resume the open responses ``before`` until enough groups are complete.

        Returns the number of tokens that were prefilled again.
        """
        groups, parts = self.groups, list[Batch]()
        verification = self._verification(before.records)
        admitted, needed = groups.outstanding(), groups.needed()

        def enough(ended: Sequence[int]) -> bool:
            return groups.suffice(step, admitted, needed, before.group, ended)

        def take(part: Batch) -> None:
            parts.append(part)
            verification.add(part)

        # 1. Resume the open responses.
        requests = ResponseRequests(
            rows=range(len(before)),
            prompt_ids=[record.input_ids for record in before.records],
            streams=before.stream.tolist(),
            sampling=self.config.rollout.train_kwargs,
            partial=before.columns("tokens", "rollout_logprobs", "version"),
            version=version,
        )
        setup = self.policy.conversations
        conversations = None if setup is None else begin_conversations(setup, before.records, before)
        with timer.phase("gen"), self._busy():
            cut, measured = self.policy.generation(requests, take, enough, conversations).run()
            verification.submit()
            verification.judge()
        # 2. Keep the interrupted responses open and mark the others as ready.
        still_open, ended = restore_columns(cut, before), restore_columns(parts, before)
        ended = None if ended is None else add_rank_metrics(ended, measured)
        if ended is not None:
            with timer.phase("reward"):
                verdicts = verification.verdicts()
            fill_verdicts(ended, verdicts, [verification.texts[row] for row in ended.request.tolist()])
            groups.ready = append(groups.ready, ended.without("request"))
        groups.open = None if still_open is None else still_open.without("request")
        # 3. Count the work, except for rereading prompts and partial responses.
        after = before.lengths.clone()
        for part in (still_open, ended):
            if part is not None:
                # An agent's session ends with one of its histories, which may be shorter than all of them.
                after[part.request] = torch.maximum(part.lengths, before.lengths[part.request])
        timer.count("gen", Work.of(after, before.lengths))
        # Responses that no engine resumed were not reread.
        resumed = (before.response_lengths > 0) & (after > before.lengths)
        return float(before.lengths[resumed].sum())

    def _filter(self, numbers: Sequence[int]) -> list[Batch]:
        """Remove and return the groups among ``numbers`` whose responses all have the same metric value."""
        groups = self.groups
        complete = groups.take(numbers)
        if complete is None:
            return []
        differ = groups_that_differ(self._filter_values(complete), self.config.rollout.n)
        rows = differ.repeat_interleave(self.config.rollout.n)
        if rows.any():
            groups.ready = append(groups.ready, complete[rows])
        return [] if rows.all() else [complete[~rows]]

    def _must_end(self, num_compared: int) -> bool:
        """Return whether there are enough groups to train on or the limit on generation batches is reached.

        Raises ``ConfigError`` if ``MAX_FRUITLESS_BATCHES`` batches contained no informative group.
        """
        filtering, num_batches = self.config.algorithm.filter_groups, num_compared // self.config.data.prompts_per_batch
        num_ready, batch_size = len(self.groups.complete()), self.groups.batch_size
        if filtering.max_num_gen_batches > 0:
            return num_ready >= batch_size or num_batches >= filtering.max_num_gen_batches
        if num_ready == 0 and num_batches >= MAX_FRUITLESS_BATCHES:
            raise nothing_to_learn(filtering.metric, num_batches)
        return num_ready >= batch_size

    def _filled(self, batch: Batch | None, filtered: Sequence[Batch]) -> SampledStep:
        """Fill up the step's batch with filtered groups, which are excluded from training."""
        n = self.config.rollout.n
        sampled = Batch.join([*([] if batch is None else [batch]), *filtered])
        num_learned = 0 if batch is None else len(batch)
        chosen = sampled[: self.config.data.train_batch_size * n]
        chosen.fill(learned=(torch.arange(len(chosen)) < num_learned) & has_turns(chosen))
        metrics: dict[str, float] = {}
        if self.config.algorithm.filter_groups.enable:
            metrics = verdict_metrics(sampled.verdicts, n, data_sources(sampled), self.sources) | {
                "async/filtered": float((len(sampled) - num_learned) // n),
                "train/filler_groups": float((len(chosen) - num_learned) // n),
            }
        return SampledStep(chosen, metrics, sampled.scores[len(chosen) :])


def restore_columns(parts: Sequence[Batch], before: Batch) -> Batch | None:
    """Join ``parts`` in the order of ``before``, and copy its ``KEPT`` columns. Return None if there are no parts."""
    if not parts:
        return None
    batch = Batch.join(parts)
    batch = batch[batch.request.argsort()]
    return batch.merge(before[batch.request].columns(*KEPT))
