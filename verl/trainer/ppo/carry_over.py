"""Responses that outlive a step: prompts are admitted ahead, and what has not ended waits for newer weights.

A group is a prompt and its n responses. Groups are admitted while those that are not learned from yet are at most
``carried_steps`` + 1 batches. A step ends when the oldest complete groups fill its batch; the engines then give back
what has not ended, and go on with it after the update. Nothing is dropped. With ``trainer.deterministic`` everything
depends on the lengths of responses, counted in steps of the engines.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from verl.batch import EPISODE, Batch
from verl.data.prompt_rows import PromptRecord
from verl.method.replay import batch_from_state, batch_state
from verl.rollout.requests import ResponseRequests, response_stream
from verl.trainer.logging.rollout_metrics import score_tensors
from verl.trainer.logging.speed import PhaseTimer, Work
from verl.trainer.ppo.sampling import Sampler, Verification

KEPT = ("records", "group", "step", "stream")
"""Columns of a response that engines do not see: ``step`` is the one in which it was admitted, ``stream`` [B] int64 its
random numbers (:func:`verl.rollout.requests.response_stream`)."""


class CarryOverSampler(Sampler):
    """Samples the responses of a step with ``async_training.partial_rollout``."""

    open: Batch | None = None
    """Responses that have not ended, as far as they are."""
    ready: Batch | None = None
    """Responses that have ended, with their verdicts, and are not learned from yet."""
    num_admitted = 0
    """Groups so far."""

    @property
    def batch_size(self) -> int:
        """Groups of a step."""
        return self.config.data.train_batch_size

    def sample_step(
        self, prompts: Iterator[list[PromptRecord]], step: int, timer: PhaseTimer
    ) -> tuple[Batch, dict[str, float]]:
        """The oldest complete groups, and metrics; the engines' memory is free afterwards."""
        self._admit(prompts, step)
        metrics = self._advance(step, timer) if self.open is not None else {}
        with timer.phase("gen"):
            self.policy.finish_generation()
        batch = self._take_oldest()
        lag = step - 1 - batch.version.double()
        metrics |= {
            "async/lag/mean": lag.mean().item(),
            "async/lag/max": lag.max().item(),
            "async/outstanding": float(self.num_admitted - step * self.batch_size),
            "async/carried_over_tokens": 0.0 if self.open is None else float(self.open.response_lengths.sum()),
        }
        columns = {"step": torch.full((len(batch),), step), "learned": torch.ones(len(batch), dtype=torch.bool)}
        return batch.widened(self.config.data.max_response_length).fill(**columns), metrics

    def _admit(self, prompts: Iterator[list[PromptRecord]], step: int) -> None:
        """Open groups until so many are outstanding as may be, but no more than the run's steps learn from."""
        last = min(step + self.config.carried_steps, self.total_steps)
        while self.num_admitted < last * self.batch_size:
            self.open = joined(self.open, self._new(self.method.choose_prompts(next(prompts)), step))

    def _new(self, records: Sequence[PromptRecord], step: int) -> Batch:
        """Open responses to these prompts."""
        n, seed = self.config.rollout.n, (self.config.seed << 32) + step
        asked = [record for record in records for _ in range(n)]
        streams = [response_stream(seed, record.uid, i % n) for i, record in enumerate(asked)]
        groups = self.num_admitted + torch.arange(len(records)).repeat_interleave(n)
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
        # The same 64 bits as a signed number.
        return batch.fill(EPISODE, stream=torch.tensor([s - (s >> 63 << 64) for s in streams]))

    def _advance(self, step: int, timer: PhaseTimer) -> dict[str, float]:
        """Have the engines go on with what is open until the step has its groups; returns metrics."""
        assert self.open is not None
        asked, parts = self.open, list[Batch]()
        verification = Verification(asked.records, self.tokenizer, self.stop_strings, self.verifiers)
        admitted = self._outstanding()

        def take(part: Batch) -> None:
            parts.append(part)
            verification.add(part)

        requests = ResponseRequests(
            rows=range(len(asked)),
            prompt_ids=[record.input_ids for record in asked.records],
            streams=asked.stream.tolist(),
            sampling=self.config.rollout.train_kwargs,
            begun=asked.columns("tokens", "rollout_logprobs", "version"),
            version=self.config.version_sampling(step),
        )
        with timer.phase("gen"):
            cut = self.policy.advance(requests, take, lambda ended: self._suffice(step, admitted, asked.group, ended))
        verification.submit()
        self.open = described(cut, asked)
        ended = described(parts, asked)
        if ended is not None:
            with timer.phase("reward"):
                verdicts = verification.verdicts()
            scores, correct = score_tensors(verdicts)
            rows = ended.request.tolist()
            ended.fill(
                texts=[verification.texts[row] for row in rows], verdicts=verdicts, scores=scores, correct=correct
            )
            self.ready = joined(self.ready, ended.without("request"))
        before, begun = asked.lengths, asked.response_lengths > 0
        after = before.clone()
        for part in (self.open, ended):
            if part is not None:
                after[part.request] = part.lengths
        # Tokens that a response began with are read again, and counted like a prompt's, as known.
        timer.count("gen", Work.of(after, before))
        if self.open is not None:
            self.open = self.open.without("request")
        return {"async/reread_tokens": float(before[begun].sum())}

    def _outstanding(self) -> dict[int, int]:
        """Groups that are not learned from yet, the oldest first, with the steps in which they were admitted."""
        pairs = {
            number: step
            for part in (self.open, self.ready)
            if part is not None
            for number, step in zip(part.group.tolist(), part.step.tolist(), strict=True)
        }
        return dict(sorted(pairs.items()))

    def _suffice(self, step: int, admitted: dict[int, int], groups: Tensor, ended: Sequence[int]) -> bool:
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
        taken = set(complete[: self.batch_size])
        if len(taken) < self.batch_size:
            return False
        carried = self.config.carried_steps
        due = Counter(admitted[group] + carried - step for group in admitted if group not in taken)
        return all(
            sum(count for steps, count in due.items() if steps <= j) <= j * self.batch_size for j in range(carried)
        )

    def _take_oldest(self) -> Batch:
        """Of what is ready, the groups of one step, which it then no longer holds."""
        assert self.ready is not None, "a step ends when its groups are complete"
        still_open = set() if self.open is None else set(self.open.group.tolist())
        complete = sorted(set(self.ready.group.tolist()) - still_open)[: self.batch_size]
        taken = torch.isin(self.ready.group, torch.tensor(complete))
        rows = taken.nonzero().flatten()
        batch = self.ready[rows[self.ready.group[rows].argsort(stable=True)]]
        self.ready = None if taken.all() else self.ready[~taken]
        return batch

    def state(self) -> dict[str, Any]:
        """What has been admitted and is not learned from yet, as JSON and tensors."""
        parts = {"open": self.open, "ready": self.ready}
        saved = {name: batch_state(part, self.prompts) for name, part in parts.items() if part is not None}
        return {"num_admitted": self.num_admitted} | saved

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state` returned."""
        self.num_admitted = state["num_admitted"]
        self.open, self.ready = (
            batch_from_state(state[name], self.prompts) if name in state else None for name in ("open", "ready")
        )


def joined(first: Batch | None, second: Batch) -> Batch:
    """Both, or what there is."""
    return second if first is None else Batch.join([first, second])


def described(parts: Sequence[Batch], asked: Batch) -> Batch | None:
    """What engines return of the responses ``asked``, in the order of these and with their columns; None of nothing."""
    if not parts:
        return None
    batch = Batch.join(parts)
    batch = batch[batch.request.argsort()]
    return batch.merge(asked[batch.request].columns(*KEPT))
