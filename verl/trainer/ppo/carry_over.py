"""Responses that outlive a step: prompts are admitted ahead, and what has not ended waits for newer weights.

A group is a prompt and its n responses. Groups are admitted while those that are not learned from yet are at most
``carried_steps`` + 1 batches. A step ends when the oldest complete groups fill its batch; the engines then give back
what has not ended, and go on with it after the update. Nothing is dropped; with ``algorithm.filter_groups`` complete
groups without a difference leave, and others are admitted in their place. With ``trainer.deterministic`` everything
depends on the lengths of responses, counted in steps of the engines.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from verl.batch import EPISODE, Batch
from verl.batch.state import batch_from_state, batch_state, restored_record, saved_record
from verl.data.prompt_rows import PromptRecord
from verl.rollout.conversations import DRIVER_COLUMNS, new_conversations, with_measured
from verl.rollout.requests import ResponseRequests, response_stream
from verl.trainer.logging.rollout_metrics import groups_that_differ, score_tensors, verdict_metrics
from verl.trainer.logging.speed import PhaseTimer, Work
from verl.trainer.ppo.sampling import MAX_FRUITLESS_BATCHES, Sampler, data_sources, nothing_to_learn

KEPT = ("records", "group", "step", "stream")
"""Columns of a response that engines do not see: ``step`` is the one in which it was admitted, ``stream`` [B] int64 its
random numbers (:func:`verl.rollout.requests.response_stream`)."""

OPEN_COLUMNS = ("tokens", "rollout_logprobs", "version", "source", *DRIVER_COLUMNS)
"""Columns of an open conversation that its next turn needs."""

ADMITTED = 1 << 31
"""Added to the number of a group in the seed of its responses, so that a prompt drawn twice gets new ones."""


class CarryOverSampler(Sampler):
    """Samples the responses of a step with ``async_training.partial_rollout``."""

    open: Batch | None = None
    """Responses that have not ended, as far as they are."""
    ready: Batch | None = None
    """Responses that have ended, with their verdicts, and are not learned from yet."""
    waiting: Sequence[PromptRecord] = ()
    """Prompts that were read from the data and are not admitted yet."""
    num_admitted = 0
    """Groups so far."""

    @property
    def batch_size(self) -> int:
        """Groups of a step."""
        return self.config.data.train_batch_size

    def sample_step(
        self, prompts: Iterator[list[PromptRecord]], step: int, timer: PhaseTimer
    ) -> tuple[Batch, dict[str, float]]:
        """The oldest complete groups, and metrics; the engines' memory is free afterwards.

        Raises:
            ConfigError: ``algorithm.filter_groups`` leaves nothing to learn from.
        """
        filtering, known, admitted = self.config.algorithm.filter_groups, set(self._complete()), self.num_admitted
        filtered, reread, num_compared = list[Batch](), 0.0, 0
        while True:
            self._admit(prompts, step)
            reread += self._advance(step, timer) if self.open is not None else 0.0
            at_least = self.batch_size
            if filtering.enable:
                # What was complete before this step has been compared.
                new = [group for group in self._complete() if group not in known]
                known |= set(new)
                num_compared += len(new)
                with timer.phase("reward"):
                    filtered += self._filter(new)
                if not self._have_to_end(num_compared):
                    continue
                at_least = 0
            # Not so where an engine was lost with responses that had been counted.
            ongoing = torch.zeros(0) if self.open is None else self.open.group
            if self._suffice(step, self._outstanding(), at_least, ongoing, ()):
                break
        with timer.phase("gen"):
            self.policy.finish_generation()
        batch, metrics = self._filled(self._take(self._complete()[: self.batch_size]), filtered)
        metrics |= {
            "async/admitted": float(self.num_admitted - admitted),
            "async/outstanding": float(len(self._outstanding())),
            "async/carried_over_tokens": 0.0 if self.open is None else float(self.open.response_lengths.sum()),
            "async/reread_tokens": reread,
        }
        batch.fill(step=torch.full((len(batch),), step))
        return batch.widened(self.config.data.max_response_length), metrics

    def _admit(self, prompts: Iterator[list[PromptRecord]], step: int) -> None:
        """Admit groups up to the limit of outstanding ones, and no more than the remaining steps learn from."""
        num_batches = min(self.config.carried_steps + 1, self.total_steps + 1 - step)
        while (missing := num_batches * self.batch_size - len(self._outstanding())) > 0:
            records = self.waiting or self.method.choose_prompts(next(prompts))
            self.open = joined(self.open, self._new(records[:missing], step))
            self.waiting = records[missing:]

    def _new(self, records: Sequence[PromptRecord], step: int) -> Batch:
        """Open responses to these prompts."""
        n, first = self.config.rollout.n, self.num_admitted
        asked = [record for record in records for _ in range(n)]
        groups = first + torch.arange(len(records)).repeat_interleave(n)
        seeds = ((self.config.seed << 32) + ADMITTED + groups).tolist()
        streams = [response_stream(seeds[i], record.uid, i % n) for i, record in enumerate(asked)]
        self.num_admitted += len(records)
        batch = Batch.of(
            [record.input_ids for record in asked],
            [[] for _ in asked],
            rollout_logprobs=torch.zeros(0),
            version=torch.zeros(0, dtype=torch.int32),
            records=asked,
            group=groups,
            step=torch.full((len(asked),), step),
        )
        if self.policy.conversations is not None:
            batch.merge(new_conversations(asked).columns("source", *DRIVER_COLUMNS))
        # The same 64 bits as a signed number.
        return batch.fill(EPISODE, stream=torch.tensor([s - (s >> 63 << 64) for s in streams]))

    def _advance(self, step: int, timer: PhaseTimer) -> float:
        """Run the engines on the open responses until the step has its groups; returns the tokens they read again."""
        assert self.open is not None
        asked, parts = self.open, list[Batch]()
        verification = self._verification(asked.records)
        admitted, needed = self._outstanding(), self._needed()

        def enough(ended: Sequence[int]) -> bool:
            return self._suffice(step, admitted, needed, asked.group, ended)

        def take(part: Batch) -> None:
            parts.append(part)
            verification.add(part)

        requests = ResponseRequests(
            rows=range(len(asked)),
            prompt_ids=[record.input_ids for record in asked.records],
            streams=asked.stream.tolist(),
            sampling=self.config.rollout.train_kwargs,
            begun=asked.columns("tokens", "rollout_logprobs", "version"),
            version=step - 1 - self.behind,
        )
        setup = self.policy.conversations
        talks = None if setup is None else setup.begin(asked.records, asked.columns(*OPEN_COLUMNS))
        with timer.phase("gen"):
            cut, measured = self.policy.advance(requests, take, enough, talks)
        verification.submit()
        self.open = described(cut, asked)
        ended = described(parts, asked)
        ended = None if ended is None else with_measured(ended, measured)
        if ended is not None:
            with timer.phase("reward"):
                verdicts = verification.verdicts()
            scores, correct = score_tensors(verdicts)
            rows = ended.request.tolist()
            ended.fill(
                texts=[verification.texts[row] for row in rows], verdicts=verdicts, scores=scores, correct=correct
            )
            self.ready = joined(self.ready, ended.without("request"))
        before = asked.lengths
        after = before.clone()
        for part in (self.open, ended):
            if part is not None:
                after[part.request] = part.lengths
        # Tokens that a response began with are read again, and counted like a prompt's, as known.
        timer.count("gen", Work.of(after, before))
        if self.open is not None:
            self.open = self.open.without("request")
        # No engine got to the others.
        begun = (asked.response_lengths > 0) & (after > before)
        return float(before[begun].sum())

    def _filter(self, groups: Sequence[int]) -> list[Batch]:
        """Remove from ``ready``, and return, the complete ``groups`` whose responses do not differ."""
        compared = self._take(groups)
        if compared is None:
            return []
        differ = groups_that_differ(self._filter_values(compared), self.config.rollout.n)
        rows = differ.repeat_interleave(self.config.rollout.n)
        if rows.any():
            self.ready = joined(self.ready, compared[rows])
        return [] if rows.all() else [compared[~rows]]

    def _have_to_end(self, num_compared: int) -> bool:
        """Whether there are enough groups to learn from, or the step has compared as many as it may.

        Raises:
            ConfigError: there is no limit, and ``MAX_FRUITLESS_BATCHES`` held nothing to learn from.
        """
        filtering, num_batches = self.config.algorithm.filter_groups, num_compared // self.config.data.prompts_per_batch
        num_ready = len(self._complete())
        if filtering.max_num_gen_batches > 0:
            return num_ready >= self.batch_size or num_batches >= filtering.max_num_gen_batches
        if num_ready == 0 and num_batches >= MAX_FRUITLESS_BATCHES:
            raise nothing_to_learn(filtering.metric, num_batches)
        return num_ready >= self.batch_size

    def _filled(self, batch: Batch | None, filtered: Sequence[Batch]) -> tuple[Batch, dict[str, float]]:
        """The batch of a step, filled up with filtered groups, which teach nothing; and the metrics of both."""
        n = self.config.rollout.n
        sampled = Batch.join([*([] if batch is None else [batch]), *filtered])
        num_learned = 0 if batch is None else len(batch)
        chosen = sampled[: self.batch_size * n]
        chosen.fill(learned=torch.arange(len(chosen)) < num_learned)
        self.dropped_scores = sampled.scores[len(chosen) :]
        if not self.config.algorithm.filter_groups.enable:
            return chosen, {}
        return chosen, verdict_metrics(sampled.verdicts, n, data_sources(sampled), self.sources) | {
            "async/filtered": float((len(sampled) - num_learned) // n),
            "train/filler_groups": float((len(chosen) - num_learned) // n),
        }

    def _outstanding(self) -> dict[int, int]:
        """The groups not learned from yet, oldest first, each with the step in which it was admitted."""
        pairs = {
            number: step
            for part in (self.open, self.ready)
            if part is not None
            for number, step in zip(part.group.tolist(), part.step.tolist(), strict=True)
        }
        return dict(sorted(pairs.items()))

    def _needed(self) -> int:
        """Complete groups with which the engines may stop.

        Of further ones that are compared, a quarter of a batch at least: to stop means to read what is open again.
        """
        ready = len(self._complete())
        return max(self.batch_size, ready + self.batch_size // 4 if ready < self.batch_size else 0)

    def _suffice(self, step: int, admitted: dict[int, int], needed: int, groups: Tensor, ended: Sequence[int]) -> bool:
        """Whether the step may end: there are enough complete groups, and what it leaves can be learned from in time.

        A group is learned from at most :attr:`PPOConfig.carried_steps` steps after that in which it was admitted, so of
        those due within the next j steps j batches at most may be left.

        Args:
            admitted: the outstanding groups, with the steps in which they were admitted.
            groups: [B], the group of each response that is sampled.
            ended: those that have ended, by their places.
        """
        left = Counter(groups.tolist())
        left.subtract(groups[list(ended)].tolist())
        complete = [group for group in admitted if not left[group]]
        if len(complete) < needed:
            return False
        # With filter_groups some of these leave unlearned, and later ones may leave too.
        taken = set(complete[: self.batch_size])
        carried = self.config.carried_steps
        due = Counter(admitted[group] + carried - step for group in admitted if group not in taken)
        return all(
            sum(count for steps, count in due.items() if steps <= j) <= j * self.batch_size for j in range(carried)
        )

    def _complete(self) -> list[int]:
        """The groups of which every response is ready, the oldest first."""
        ready, still_open = (set() if part is None else set(part.group.tolist()) for part in (self.ready, self.open))
        return sorted(ready - still_open)

    def _take(self, groups: Sequence[int]) -> Batch | None:
        """Remove these complete groups from ``ready`` and return them in this order; None if there are none."""
        if not groups:
            return None
        assert self.ready is not None
        taken = torch.isin(self.ready.group, torch.tensor(groups))
        rows = taken.nonzero().flatten()
        batch = self.ready[rows[self.ready.group[rows].argsort(stable=True)]]
        self.ready = None if taken.all() else self.ready[~taken]
        return batch

    def state(self) -> dict[str, Any]:
        """What has been admitted and is not learned from yet, as JSON and tensors."""
        parts = {"open": self.open, "ready": self.ready}
        saved = {name: batch_state(part, self.prompts) for name, part in parts.items() if part is not None}
        waiting = [saved_record(record, self.prompts) for record in self.waiting]
        return {"num_admitted": self.num_admitted, "waiting": waiting} | saved

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state` returned."""
        self.num_admitted = state["num_admitted"]
        self.waiting = [restored_record(saved, self.prompts) for saved in state["waiting"]]
        self.open, self.ready = (
            batch_from_state(state[name], self.prompts) if name in state else None for name in ("open", "ready")
        )


def joined(first: Batch | None, second: Batch) -> Batch:
    """``second`` appended to ``first``, if there is one."""
    return second if first is None else Batch.join([first, second])


def described(parts: Sequence[Batch], asked: Batch) -> Batch | None:
    """The engines' ``parts`` of ``asked``, in its order and with its ``KEPT`` columns; None if there are none."""
    if not parts:
        return None
    batch = Batch.join(parts)
    batch = batch[batch.request.argsort()]
    return batch.merge(asked[batch.request].columns(*KEPT))
