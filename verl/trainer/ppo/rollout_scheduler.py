"""Rollout scheduler, which samples and verifies responses for training steps and validation.

It decides which prompts to sample in a step: the next batch, or with ``algorithm.filter_groups``, further batches until
there are enough informative groups (dynamic sampling). ``partial_rollouts.py`` has the scheduler of partial rollouts.

Legend: G prompts, n consecutive responses per prompt, B = G n responses.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verl.batch import Batch
from verl.config.errors import ConfigError
from verl.config.ppo import PPOConfig
from verl.config.rollout import SamplingConfig
from verl.data.prompt_record import PromptRecord
from verl.method.calls import MAX_ROUNDS, MethodCalls
from verl.rewards.pool import VerifierPool
from verl.rollout.requests import occurrences
from verl.single_controller.roles import PolicyWorkers
from verl.trainer.logging.rollout_metrics import data_sources, groups_that_differ, verdict_metrics
from verl.trainer.logging.speed import PhaseTimer, Work
from verl.trainer.ppo.advantages import ResponseRewards
from verl.trainer.ppo.judging import Judging
from verl.trainer.ppo.resampled import FIRST, edited_metrics, original, replace_groups
from verl.trainer.ppo.verification import Verification
from verl.verifiers.verdict import Verdict

VALIDATION_STEP = 1 << 20
"""Step number used in the seeds of all validations. Training never uses this value."""

MAX_FRUITLESS_BATCHES = 100
"""Maximum number of batches without an informative group in a step, if ``max_num_gen_batches`` sets no limit."""

ROUND_STEP = 1 << 29
"""Offset added to the step number in the seed for each round of resampling."""

REPEATED = 1 << 40
"""Offset added to a group's id for each earlier occurrence of its prompt in the batch."""

REFILL_STEP = 1 << 21
"""Offset added to the step in the seed for each additional batch, so that repeated prompts yield new responses."""


class SampledStep(NamedTuple):
    """Responses sampled in one training step."""

    batch: Batch
    metrics: dict[str, float]
    dropped_scores: Tensor
    """Scores of the responses that were sampled but dropped, [B']."""
    greedy: Batch | None = None
    """Greedy responses, one per prompt, for ReMax."""
    verifications: Sequence[Verification] = ()
    """Verifications that may still be running."""

    def collect_verdicts(self, timer: PhaseTimer) -> Self:
        """Wait for the verifiers in the phase ``reward``, and fill their columns in ``batch`` and ``greedy`` in place.

        Returns this step without its verifications, to free what they hold.
        """
        finish(self.verifications, timer)
        return self._replace(verifications=())


@dataclass(eq=False)
class RolloutScheduler:
    """Scheduler that samples the responses for training steps and validation."""

    config: PPOConfig
    tokenizer: PreTrainedTokenizerBase
    policy: PolicyWorkers
    verifiers: VerifierPool
    stop_strings: Sequence[str]
    """Strings that end a response and are removed from the text to verify."""
    method: MethodCalls
    rewards: ResponseRewards
    sources: Sequence[str] = ()
    """Data sources that are logged separately (``logged_sources``)."""
    prompts: Sequence[PromptRecord] = ()
    """Training data, indexed by ``uid``."""
    total_steps: int = 0
    """Number of steps in the run."""
    judging: Judging | None = None
    """Judge that scores responses after sampling, or None if there is no such judge."""

    def __post_init__(self) -> None:
        self._idle_since: float | None = None
        self._idle_s = 0.0

    def state(self) -> dict[str, Any]:
        """Return the state that is carried over between steps, as JSON values and tensors."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state`."""

    # --- Generation ---

    def generate(
        self,
        records: Sequence[PromptRecord],
        sampling: SamplingConfig,
        step: int,
        settings: Mapping[str, Any] | None = None,
        timer: PhaseTimer | None = None,
    ) -> tuple[Batch, Verification]:
        """Generate ``sampling.n`` responses to each prompt and start verifying each response as soon as it finishes.

        Random draws depend only on the run's seed, ``step`` and the prompt. ``settings`` override ``sampling``, and
        ``timer``, if set, measures the phase ``gen``.
        """
        prompts = [record for record in records for _ in range(sampling.n)]
        verification = self._verification(prompts, sampling.n)
        seed = (self.config.seed << 32) + step
        with nullcontext() if timer is None else timer.phase("gen"), self._busy():
            batch = self.policy.generate(records, sampling, seed, verification.add, settings)
            verification.submit()
            verification.judge()
        # A prompt that is there twice makes two groups.
        times = zip(records, occurrences(records), strict=True)
        group = torch.tensor([record.uid + count * REPEATED for record, count in times for _ in range(sampling.n)])
        batch.fill(records=prompts, group=group, learned=has_turns(batch))
        verification.batch = batch
        if timer is not None:
            # Prompts are not counted, because each is processed only once for all its responses.
            timer.count("gen", Work.of(batch.lengths, batch.prompt_lengths))
        return batch, verification

    def _verification(self, prompts: Sequence[PromptRecord], group_size: int = 1) -> Verification:
        reward, optional = self.config.rollout.multi_turn.reward, not self.config.needs_verdicts
        texts = (prompts, self.tokenizer, self.stop_strings)
        return Verification(*texts, self.verifiers, reward, optional, self.judging, group_size)

    @contextmanager
    def _busy(self) -> Iterator[None]:
        """Mark the engines as busy in the ``with`` block and count the preceding idle time."""
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

    def take_idle_s(self) -> float:
        """Return how many seconds the engines have been idle since the last call."""
        self._count_idle()
        idle, self._idle_s = self._idle_s, 0.0
        return idle

    # --- A training step ---

    def sample(
        self, prompts: Iterator[list[PromptRecord]], step: int, timer: PhaseTimer, version: int | None = None
    ) -> SampledStep:
        """Sample the responses for a training step, then free the engines' memory.

        Raises ``ConfigError`` if ``algorithm.filter_groups`` finds no informative group.

        Args:
            version: Version of the engines' weights, or None for the newest weights before ``step``.
        """
        sampled = self._sample_whole(prompts, step, timer)
        batch = sampled.batch.fill(step=torch.full((len(sampled.batch),), step))
        if version is not None:
            num_tokens = int(batch.response_lengths.sum())
            batch.fill(version=torch.full((num_tokens,), version, dtype=torch.int32))
        if self.config.algorithm.adv_estimator == "remax":
            sampling = replace(self.config.rollout.train_kwargs, n=1, temperature=0.0)
            records = batch.records[:: self.config.rollout.n]
            greedy, verification = self.generate(records, sampling, step, None, timer)
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
        """Sample responses to the next prompts and resample the prompts that the method edits.

        ``number`` is the index of this batch within the step. Returns the responses and any verifications that may
        still be running.
        """
        sampling, method = self.config.rollout.train_kwargs, self.method
        draws = step + number * REFILL_STEP
        records = method.choose_prompts(next(prompts))
        batch, verification = self.generate(records, sampling, draws, method.settings(records), timer)
        if not method.overrides("resample"):
            return batch, [verification]
        finish([verification], timer)
        first_round = {"first_records": batch.records, "first_verdicts": batch.verdicts}
        for round in range(1, MAX_ROUNDS + 1):
            edited = method.resample(batch, round)
            if not edited:
                break
            records = list(edited.values())
            settings = method.settings(records)
            resampled, verification = self.generate(records, sampling, draws + round * ROUND_STEP, settings, timer)
            finish([verification], timer)
            batch = replace_groups(batch, list(edited), resampled, sampling.n)
        return batch.fill(**first_round), []

    def _sample_informative(self, prompts: Iterator[list[PromptRecord]], step: int, timer: PhaseTimer) -> SampledStep:
        """Sample responses with dynamic sampling (DAPO, arXiv 2503.14476, section 3.2).

        Sample batches until there are ``data.train_batch_size`` informative groups or ``max_num_gen_batches`` is
        reached. A group is informative if its responses differ in the metric of ``algorithm.filter_groups``. Fill the
        rest of the batch with other prompts, which are excluded from training. Metrics are computed over all sampled
        responses. Raises ``ConfigError`` if ``MAX_FRUITLESS_BATCHES`` batches contained no informative group.
        """
        n, filtering = self.config.rollout.n, self.config.algorithm.filter_groups
        informative: list[Batch] = []
        others: list[Batch] = []
        verdicts: list[Verdict] = []
        sources: list[str] = []
        size = missing = self.config.data.train_batch_size
        num_batches, limit = 0, filtering.max_num_gen_batches
        while missing > 0 and (limit <= 0 or num_batches < limit):
            # 1. Sample and verify a batch.
            batch, verifications = self._sample_batch(prompts, step, num_batches, timer)
            finish(verifications, timer)
            with timer.phase("reward"):
                values = self._filter_values(batch)
            num_batches += 1
            verdicts += original(batch, "verdicts")
            sources += data_sources(batch)
            # 2. Keep informative groups, up to the number that is still missing.
            differs = groups_that_differ(values, n)
            kept = (differs & (differs.cumsum(dim=0) <= missing)).repeat_interleave(n)
            informative.append(batch[kept])
            others.append(batch[~kept])
            missing -= int(kept.sum()) // n
            if limit <= 0 and missing == size and num_batches == MAX_FRUITLESS_BATCHES:
                raise nothing_to_learn(filtering.metric, num_batches)
        chosen, dropped = Batch.join(informative), Batch.join(others)
        metrics = edited_metrics(Batch.join([chosen, dropped]), n) if FIRST[0] in chosen else {}
        # 3. Fill up the batch with other groups.
        if missing:
            filler = dropped[: missing * n]
            filler.fill(learned=torch.zeros(len(filler), dtype=torch.bool))
            chosen, dropped = Batch.join([chosen, filler]), dropped[missing * n :]
        # Renumber the groups, because a prompt drawn twice in one step has two groups.
        chosen.fill(group=torch.arange(len(chosen) // n).repeat_interleave(n))
        metrics |= verdict_metrics(verdicts, n, sources, self.sources)
        metrics |= {"train/num_gen_batches": float(num_batches), "train/filler_groups": float(missing)}
        return SampledStep(chosen, metrics, dropped.scores)

    def _filter_values(self, batch: Batch) -> Tensor:
        """Return each response's value of the ``algorithm.filter_groups`` metric, [B]."""
        metric = self.config.algorithm.filter_groups.metric
        if metric == "acc":
            return batch.correct
        if metric == "score":
            return batch.scores
        if self.config.uses_reward_model:
            # Free the engine's memory for the reward model; the next batch wakes the engine up.
            self.policy.finish_generation()
        return self.rewards.compute(batch)[0]


def finish(verifications: Iterable[Verification], timer: PhaseTimer) -> None:
    """Wait for the verdicts, and add the waiting time to the phase ``reward``."""
    with timer.phase("reward"):
        for verification in verifications:
            verification.finish()


def has_turns(batch: Batch) -> Tensor:
    """Return which episodes have a response, [B] bool. Those of agents that never requested a turn have none."""
    return batch.turns > 0 if "turns" in batch else torch.ones(len(batch), dtype=torch.bool)


def nothing_to_learn(metric: str, num_batches: int) -> ConfigError:
    """Return the error to raise if dynamic sampling finds no informative groups."""
    return ConfigError(
        f"algorithm.filter_groups.metric={metric!r}: no prompt of {num_batches} batches has responses that differ, so "
        "there is nothing to learn from; use easier or harder prompts, or set "
        "algorithm.filter_groups.max_num_gen_batches"
    )
