"""The rollout scheduler: prompts in, verified responses out, for one training step after another.

It drives the rollout engines and the verifiers, and decides which prompts a step samples: the next batch; with
``algorithm.filter_groups`` as many batches as it takes (dynamic sampling); with ``async_training.partial_rollout`` the
groups that are open, so that engines never run empty for the longest responses of a batch: a step learns from the
oldest complete groups, and the scheduler keeps the partial responses and resumes them after the update. With
``trainer.deterministic`` everything depends on the lengths of responses, counted in steps of the engines.

Legend: G prompts, n responses to each, B = G n responses, neighbours where they share a prompt.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verl.batch import Batch
from verl.config.errors import ConfigError
from verl.config.ppo import PPOConfig
from verl.config.rollout import SamplingConfig
from verl.data.prompt_rows import PromptRecord
from verl.method.calls import MAX_ROUNDS, MethodCalls
from verl.rewards.pool import VerifierPool
from verl.rollout.environments.conversations import DRIVER_COLUMNS, with_measured
from verl.rollout.requests import ResponseRequests, ResponseSettings
from verl.single_controller.roles import PolicyWorkers
from verl.trainer.logging.rollout_metrics import data_sources, groups_that_differ, verdict_metrics
from verl.trainer.logging.speed import PhaseTimer, Work
from verl.trainer.ppo.advantages import ResponseRewards
from verl.trainer.ppo.open_groups import OpenGroups, append
from verl.trainer.ppo.resampled import FIRST, edited_metrics, first, replace_groups
from verl.trainer.ppo.verification import Verification, fill_verdicts
from verl.verifiers.verdict import Verdict

VALIDATION_STEP = 1 << 20
"""Takes the place of the step in the seed of validation: the same at every validation, and never used in training."""

MAX_FRUITLESS_BATCHES = 100
"""Batches of one step without a group to learn from after which a run without a limit of batches ends."""

ROUND_STEP = 1 << 29
"""Added to the step in the seed each time that a prompt is sampled again."""

REFILL_STEP = 1 << 21
"""Added to the step in the seed for each further batch of a step, so that a prompt drawn twice gets new responses."""

KEPT = ("records", "group", "step", "stream")
"""Columns of an open response that engines do not see: ``step`` is the one that admitted it, ``stream`` [B] int64 its
random numbers (:func:`verl.rollout.requests.response_stream`)."""

OPEN_COLUMNS = ("tokens", "rollout_logprobs", "version", "source", *DRIVER_COLUMNS)
"""Columns of an open conversation that its next turn needs."""


class SampledStep(NamedTuple):
    """The responses of one training step."""

    batch: Batch
    metrics: dict[str, float]
    dropped_scores: Tensor
    """[B'], the verifiers' scores of responses that were sampled for the step and dropped."""
    greedy: Batch | None = None
    """The greedy response to each prompt; with ReMax only."""
    verifications: Sequence[Verification] = ()
    """Verifications that may still run."""

    def collect_verdicts(self) -> None:
        """Wait for the verifiers; fill their columns of ``batch`` and ``greedy``."""
        for verification in self.verifications:
            verification.finish()


class RolloutScheduler:
    """Samples the responses of training steps and of validation.

    Args:
        stop_strings: strings that end a response; they are not part of the text that is scored.
        sources: the data sources of the training data that are logged separately (``logged_sources``).
        prompts: the training data, by ``uid``.
        total_steps: of the run.
    """

    def __init__(
        self,
        config: PPOConfig,
        tokenizer: PreTrainedTokenizerBase,
        policy: PolicyWorkers,
        verifiers: VerifierPool,
        stop_strings: Sequence[str],
        method: MethodCalls,
        rewards: ResponseRewards,
        sources: Sequence[str] = (),
        prompts: Sequence[PromptRecord] = (),
        total_steps: int = 0,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.policy = policy
        self.verifiers = verifiers
        self.stop_strings = stop_strings
        self.method = method
        self.rewards = rewards
        self.sources = sources
        self.prompts = prompts
        self.total_steps = total_steps
        self.groups: OpenGroups | None = None
        """Groups carried from step to step; None without ``async_training.partial_rollout``."""
        if config.async_training.partial_rollout:
            self.groups = OpenGroups(config.rollout.n, config.data.train_batch_size, config.carried_steps)
        self._idle_since: float | None = None
        self._idle_s = 0.0

    def state(self) -> dict[str, Any]:
        """Return what outlives a step, as JSON and tensors."""
        return {} if self.groups is None else self.groups.state(self.prompts)

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state` returned."""
        if self.groups is not None:
            self.groups.load_state(state, self.prompts)

    def take_idle_s(self) -> float:
        """Return the seconds in which the engines had nothing to do since the last call."""
        self._count_idle()
        idle, self._idle_s = self._idle_s, 0.0
        return idle

    # --- Responses to given prompts ---

    def generate(
        self,
        records: Sequence[PromptRecord],
        sampling: SamplingConfig,
        step: int,
        settings: ResponseSettings | None = None,
    ) -> tuple[Batch, Verification]:
        """Generate ``sampling.n`` responses to each prompt, and have them verified as they end.

        Their random draws depend on the run's seed, ``step`` and the prompt alone. ``settings`` override ``sampling``.
        """
        prompts = [record for record in records for _ in range(sampling.n)]
        verification = self._verification(prompts)
        seed = (self.config.seed << 32) + step
        with self._busy():
            batch = self.policy.generate(records, sampling, seed, verification.add, settings)
        verification.submit()
        group = torch.tensor([record.uid for record in prompts])
        batch.fill(records=prompts, group=group, learned=torch.ones(len(prompts), dtype=torch.bool))
        verification.batch = batch
        return batch, verification

    def _generate(
        self,
        records: Sequence[PromptRecord],
        sampling: SamplingConfig,
        step: int,
        timer: PhaseTimer,
        settings: ResponseSettings | None = None,
    ) -> tuple[Batch, Verification]:
        """Do :meth:`generate` and count its work."""
        with timer.phase("gen"):
            batch, verification = self.generate(records, sampling, step, settings)
        # Prompts, read once for all their responses, are not counted.
        timer.count("gen", Work.of(batch.lengths, batch.prompt_lengths))
        return batch, verification

    def _verification(self, prompts: Sequence[PromptRecord]) -> Verification:
        reward = self.config.rollout.multi_turn.reward
        return Verification(prompts, self.tokenizer, self.stop_strings, self.verifiers, reward)

    @contextmanager
    def _busy(self) -> Iterator[None]:
        """Mark the engines as busy, for :meth:`take_idle_s`."""
        self._count_idle()
        self._idle_since = None
        try:
            yield
        finally:
            self._idle_since = time.perf_counter()

    def _count_idle(self) -> None:
        if self._idle_since is not None:
            now = time.perf_counter()
            self._idle_s += now - self._idle_since
            self._idle_since = now

    # --- A training step ---

    def sample(
        self, prompts: Iterator[list[PromptRecord]], step: int, timer: PhaseTimer, version: int | None = None
    ) -> SampledStep:
        """Sample the responses of a training step; the engines' memory is free afterwards.

        Args:
            version: of the weights that the engines have; None: those of ``step``.

        Raises:
            ConfigError: ``algorithm.filter_groups`` leaves nothing to learn from.
        """
        if self.groups is not None:
            return self._sample_open(self.groups, prompts, step, timer, step - 1 if version is None else version)
        sampled = self._sample_whole(prompts, step, timer)
        batch = sampled.batch.fill(step=torch.full((len(sampled.batch),), step))
        if version is not None:
            num_tokens = int(batch.response_lengths.sum())
            batch.fill(version=torch.full((num_tokens,), version, dtype=torch.int32))
        if self.config.algorithm.adv_estimator == "remax":
            sampling = replace(self.config.rollout.train_kwargs, n=1, temperature=0.0)
            records = batch.records[:: self.config.rollout.n]
            greedy, verification = self._generate(records, sampling, step, timer)
            sampled = sampled._replace(greedy=greedy, verifications=[*sampled.verifications, verification])
        with timer.phase("gen"):
            self.policy.finish_generation()
        return sampled

    def _sample_whole(self, prompts: Iterator[list[PromptRecord]], step: int, timer: PhaseTimer) -> SampledStep:
        if self.config.algorithm.filter_groups.enable:
            return self._sample_informative(prompts, step, timer)
        batch, verifications = self._sample_batch(prompts, step, 0, timer)
        metrics: dict[str, float] = {}
        if FIRST[0] in batch:
            n = self.config.rollout.n
            metrics = verdict_metrics(batch.first_verdicts, n, data_sources(batch), self.sources)
            metrics |= edited_metrics(batch, n)
        return SampledStep(batch, metrics, torch.zeros(0), verifications=verifications)

    def _sample_batch(
        self, prompts: Iterator[list[PromptRecord]], step: int, number: int, timer: PhaseTimer
    ) -> tuple[Batch, list[Verification]]:
        """Sample the next prompts, of which the method may choose some and edit some again.

        Args:
            number: of this batch among those of the step, from 0.

        Returns:
            The responses, and the verification that may still run.
        """
        sampling, method = self.config.rollout.train_kwargs, self.method
        draws = step + number * REFILL_STEP
        records = method.choose_prompts(next(prompts))
        batch, verification = self._generate(records, sampling, draws, timer, method.settings(records))
        if not method.overrides("resample"):
            return batch, [verification]
        finish(verification, timer)
        first_round = {"first_records": batch.records, "first_verdicts": batch.verdicts}
        for round in range(1, MAX_ROUNDS + 1):
            edited = method.resample(batch, round)
            if not edited:
                break
            records = list(edited.values())
            settings = method.settings(records)
            again, verification = self._generate(records, sampling, draws + round * ROUND_STEP, timer, settings)
            finish(verification, timer)
            batch = replace_groups(batch, list(edited), again, sampling.n)
        return batch.fill(**first_round), []

    def _sample_informative(self, prompts: Iterator[list[PromptRecord]], step: int, timer: PhaseTimer) -> SampledStep:
        """Sample dynamically (DAPO, arXiv 2503.14476, section 3.2). The metrics count all that was sampled.

        Batches are sampled until there are ``data.train_batch_size`` prompts whose responses differ in the metric of
        ``algorithm.filter_groups``, or its ``max_num_gen_batches`` is reached. Prompts without a difference then fill
        the batch up, and are not learned from.

        Raises:
            ConfigError: there is no limit of batches, and ``MAX_FRUITLESS_BATCHES`` held nothing to learn from.
        """
        n, filtering = self.config.rollout.n, self.config.algorithm.filter_groups
        informative: list[Batch] = []
        others: list[Batch] = []
        verdicts: list[Verdict] = []
        sources: list[str] = []
        size = missing = self.config.data.train_batch_size
        num_batches, limit = 0, filtering.max_num_gen_batches
        while missing > 0 and (limit <= 0 or num_batches < limit):
            batch, verifications = self._sample_batch(prompts, step, num_batches, timer)
            with timer.phase("reward"):
                for verification in verifications:
                    verification.finish()
                values = self._filter_values(batch)
            num_batches += 1
            verdicts += first(batch, "verdicts")
            sources += data_sources(batch)
            differs = groups_that_differ(values, n)
            kept = (differs & (differs.cumsum(dim=0) <= missing)).repeat_interleave(n)
            informative.append(batch[kept])
            others.append(batch[~kept])
            missing -= int(kept.sum()) // n
            if limit <= 0 and missing == size and num_batches == MAX_FRUITLESS_BATCHES:
                raise nothing_to_learn(filtering.metric, num_batches)
        chosen, dropped = Batch.join(informative), Batch.join(others)
        metrics = edited_metrics(Batch.join([chosen, dropped]), n) if FIRST[0] in chosen else {}
        if missing:
            filler = dropped[: missing * n]
            filler.fill(learned=torch.zeros(len(filler), dtype=torch.bool))
            chosen, dropped = Batch.join([chosen, filler]), dropped[missing * n :]
        # A prompt drawn twice in one step makes two groups.
        chosen.fill(group=torch.arange(len(chosen) // n).repeat_interleave(n))
        metrics |= verdict_metrics(verdicts, n, sources, self.sources)
        metrics |= {"train/num_gen_batches": float(num_batches), "train/filler_groups": float(missing)}
        return SampledStep(chosen, metrics, dropped.scores)

    def _filter_values(self, batch: Batch) -> Tensor:
        """Return what groups are compared by, [B]."""
        metric = self.config.algorithm.filter_groups.metric
        if metric == "acc":
            return batch.correct
        if metric == "score":
            return batch.scores
        if self.config.uses_reward_model:
            # The reward model needs the memory that the engine holds while it samples; further batches wake it.
            self.policy.finish_generation()
        return self.rewards.compute(batch)[0]

    # --- A training step with groups that outlive it ---

    def _sample_open(
        self, groups: OpenGroups, prompts: Iterator[list[PromptRecord]], step: int, timer: PhaseTimer, version: int
    ) -> SampledStep:
        """Return the oldest complete groups.

        Complete groups that ``algorithm.filter_groups`` finds without a difference leave, and others are admitted
        instead.
        """
        filtering, known, admitted = self.config.algorithm.filter_groups, set(groups.complete()), groups.num_admitted
        filtered, reread, num_compared = list[Batch](), 0.0, 0
        while True:
            # 1. Admit groups, and run the engines until enough are complete.
            self._admit(groups, prompts, step)
            reread += self._advance(groups, step, version, timer) if groups.open is not None else 0.0
            if not filtering.enable:
                break
            # 2. Compare the groups that were completed in this step.
            new = [group for group in groups.complete() if group not in known]
            known |= set(new)
            num_compared += len(new)
            with timer.phase("reward"):
                filtered += self._filter(groups, new)
            if self._must_end(groups, num_compared):
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

    def _admit(self, groups: OpenGroups, prompts: Iterator[list[PromptRecord]], step: int) -> None:
        """Admit groups up to the limit of outstanding ones, and no more than the remaining steps learn from."""
        num_batches = min(self.config.carried_steps + 1, self.total_steps + 1 - step)
        while (missing := num_batches * groups.batch_size - len(groups.outstanding())) > 0:
            records = groups.waiting or self.method.choose_prompts(next(prompts))
            groups.admit(records[:missing], step, self.config.seed, self.policy.conversations is not None)
            groups.waiting = records[missing:]

    def _advance(self, groups: OpenGroups, step: int, version: int, timer: PhaseTimer) -> float:
        """Run the engines on the open responses until the step has its groups; return the tokens they read again."""
        assert groups.open is not None
        before, parts = groups.open, list[Batch]()
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
        talks = None if setup is None else setup.begin(before.records, before.columns(*OPEN_COLUMNS))
        with timer.phase("gen"), self._busy():
            cut, measured = self.policy.advance(requests, take, enough, talks)
        verification.submit()
        # 2. Those that were cut stay open, the others are ready.
        still_open, ended = restore_columns(cut, before), restore_columns(parts, before)
        ended = None if ended is None else with_measured(ended, measured)
        if ended is not None:
            with timer.phase("reward"):
                verdicts = verification.verdicts()
            fill_verdicts(ended, verdicts, [verification.texts[row] for row in ended.request.tolist()])
            groups.ready = append(groups.ready, ended.without("request"))
        groups.open = None if still_open is None else still_open.without("request")
        # 3. Count. Tokens of partial responses are read again, and counted as known, like a prompt's.
        after = before.lengths.clone()
        for part in (still_open, ended):
            if part is not None:
                after[part.request] = part.lengths
        timer.count("gen", Work.of(after, before.lengths))
        # No engine got to the others.
        resumed = (before.response_lengths > 0) & (after > before.lengths)
        return float(before.lengths[resumed].sum())

    def _filter(self, groups: OpenGroups, numbers: Sequence[int]) -> list[Batch]:
        """Remove and return those of the complete groups whose responses do not differ."""
        compared = groups.take(numbers)
        if compared is None:
            return []
        differ = groups_that_differ(self._filter_values(compared), self.config.rollout.n)
        rows = differ.repeat_interleave(self.config.rollout.n)
        if rows.any():
            groups.ready = append(groups.ready, compared[rows])
        return [] if rows.all() else [compared[~rows]]

    def _must_end(self, groups: OpenGroups, num_compared: int) -> bool:
        """Return whether there are enough groups to learn from, or the step has compared as many as it may.

        Raises:
            ConfigError: there is no limit, and ``MAX_FRUITLESS_BATCHES`` held nothing to learn from.
        """
        filtering, num_batches = self.config.algorithm.filter_groups, num_compared // self.config.data.prompts_per_batch
        num_ready = len(groups.complete())
        if filtering.max_num_gen_batches > 0:
            return num_ready >= groups.batch_size or num_batches >= filtering.max_num_gen_batches
        if num_ready == 0 and num_batches >= MAX_FRUITLESS_BATCHES:
            raise nothing_to_learn(filtering.metric, num_batches)
        return num_ready >= groups.batch_size

    def _filled(self, batch: Batch | None, filtered: Sequence[Batch]) -> SampledStep:
        """Pad the step's batch with filtered groups, which are not learned from."""
        n = self.config.rollout.n
        sampled = Batch.join([*([] if batch is None else [batch]), *filtered])
        num_learned = 0 if batch is None else len(batch)
        chosen = sampled[: self.config.data.train_batch_size * n]
        chosen.fill(learned=torch.arange(len(chosen)) < num_learned)
        metrics: dict[str, float] = {}
        if self.config.algorithm.filter_groups.enable:
            metrics = verdict_metrics(sampled.verdicts, n, data_sources(sampled), self.sources) | {
                "async/filtered": float((len(sampled) - num_learned) // n),
                "train/filler_groups": float((len(chosen) - num_learned) // n),
            }
        return SampledStep(chosen, metrics, sampled.scores[len(chosen) :])


def finish(verification: Verification, timer: PhaseTimer) -> None:
    """Wait for the verdicts, and count the time."""
    with timer.phase("reward"):
        verification.finish()


def restore_columns(parts: Sequence[Batch], before: Batch) -> Batch | None:
    """Join the engines' ``parts`` of ``before``, in its order and with its ``KEPT`` columns; None if there are none."""
    if not parts:
        return None
    batch = Batch.join(parts)
    batch = batch[batch.request.argsort()]
    return batch.merge(before[batch.request].columns(*KEPT))


def nothing_to_learn(metric: str, num_batches: int) -> ConfigError:
    """Return the error of dynamic sampling that finds nothing."""
    return ConfigError(
        f"algorithm.filter_groups.metric={metric!r}: no prompt of {num_batches} batches has responses that differ, so "
        "there is nothing to learn from; use easier or harder prompts, or set "
        "algorithm.filter_groups.max_num_gen_batches"
    )
