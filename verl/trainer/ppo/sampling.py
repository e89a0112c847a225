"""Prompts in, responses out: generation, verification, dynamic sampling, and rewards.

Legend: G prompts, n responses to each, B = G n responses, neighbours where they share a prompt.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verl.algorithms.scores import overlong_penalty
from verl.batch import Batch
from verl.config.errors import ConfigError
from verl.config.ppo import PPOConfig
from verl.config.rollout import SamplingConfig
from verl.data.prompt_rows import PromptRecord
from verl.method.calls import MAX_ROUNDS, MethodCalls
from verl.models.tokenizer import reward_model_batch
from verl.rewards import Score
from verl.rewards.pool import PendingScores, VerifierPool
from verl.rewards.score import score_of
from verl.rollout.conversations import policy_texts
from verl.rollout.requests import ResponseSettings
from verl.single_controller.roles import PolicyWorkers, RoleWorkers
from verl.trainer.logging.rollout_metrics import groups_that_differ, score_tensors, verdict_metrics
from verl.trainer.logging.speed import PhaseTimer, Work
from verl.verifiers.verdict import Verdict

FIRST = ("first_records", "first_verdicts")
"""Columns with the prompts as the data set has them and the verdicts on the responses to these, where
``Method.judged`` may replace them."""

VALIDATION_STEP = 1 << 20
"""Takes the place of the step in the seed of validation: the same at every validation, and never used in training."""

MAX_FRUITLESS_BATCHES = 100
"""Batches of one step without a group to learn from after which a run without a limit of batches ends."""

ROUND_STEP = 1 << 29
"""Added to the step in the seed for each time that a prompt is sampled again."""

REFILL_STEP = 1 << 21
"""Added to the step in the seed for each further batch of a step, so that a prompt drawn twice gets new responses."""


class Verification:
    """Has the responses of one batch verified as they arrive.

    A batch of the pool begins when the one before has ended. Meanwhile responses gather, so that few messages carry
    them, and one that takes long to verify does not hold up the others one by one.
    """

    def __init__(
        self,
        records: Sequence[PromptRecord],
        tokenizer: PreTrainedTokenizerBase,
        stop_strings: Sequence[str],
        verifiers: VerifierPool,
        of_environment: str = "add",
    ) -> None:
        """
        Args:
            records: the prompt of each response, B.
            of_environment: ``rollout.multi_turn.reward``.
        """
        self.records = records
        self.of_environment = of_environment
        self._rewards: dict[int, float] = {}
        """What environments gave."""
        self.tokenizer = tokenizer
        self.stop_strings = stop_strings
        self.verifiers = verifiers
        self.texts = [""] * len(records)
        """What verifiers read of each response."""
        self._gathered: list[int] = []
        self._submitted: list[tuple[list[int], PendingScores]] = []

    def add(self, part: Batch) -> None:
        """Take responses that have ended; their ``request`` says which they are."""
        rows = part.request.tolist()
        for row, text in zip(rows, policy_texts(part, self.tokenizer, self.stop_strings), strict=True):
            self.texts[row] = text
        if "environment_rewards" in part:
            self._rewards |= zip(rows, part.environment_rewards.tolist(), strict=True)
            if self.of_environment == "only":
                return
        self._gathered += rows
        if not self._submitted or self._submitted[-1][1].done():
            self.submit()

    def submit(self) -> None:
        """Have the gathered responses verified; also after the last :meth:`add`."""
        rows, self._gathered = self._gathered, []
        if not rows:
            return
        records = [self.records[row] for row in rows]
        pending = self.verifiers.submit_batch(
            [record.data_source for record in records],
            [self.texts[row] for row in rows],
            [record.ground_truth for record in records],
            [record.extra_info for record in records],
            [record.opens_thought for record in records],
            [record.asks_for_hashes for record in records],
        )
        self._submitted.append((rows, pending))

    def verdicts(self) -> list[Score]:
        """Wait for the verdicts on the responses that were added, in the order of their prompts. Raises the first error
        of any."""
        verdicts: dict[int, Score] = {}
        for rows, pending in self._submitted:
            verdicts |= zip(rows, pending.result(), strict=True)
        for row, reward in self._rewards.items():
            verdict = verdicts.get(row) or score_of(Verdict(reward > 0, False, "environment", score=0.0), "mix")
            verdicts[row] = {**verdict, "score": verdict["score"] + reward}
        return [verdicts[row] for row in sorted(verdicts)]


class Sampler:
    """Drives rollout engines, verifiers and the reward model."""

    behind = 0
    """Versions that the weights which sample for a step are behind those that learn from it: 1 a step ahead."""

    def __init__(
        self,
        config: PPOConfig,
        tokenizer: PreTrainedTokenizerBase,
        reward_tokenizer: PreTrainedTokenizerBase | None,
        policy: PolicyWorkers,
        verifiers: VerifierPool,
        stop_strings: Sequence[str],
        method: MethodCalls,
        sources: Sequence[str] = (),
        prompts: Sequence[PromptRecord] = (),
        total_steps: int = 0,
    ) -> None:
        """
        Args:
            prompts: the training data, by ``uid``.
            total_steps: of the run.
            reward_tokenizer: the reward model's; None without one.
            stop_strings: strings that end a response; they are not part of the text that is scored.
            sources: the training data's with figures of their own (``logged_sources``).
        """
        self.config = config
        self.tokenizer = tokenizer
        self.reward_tokenizer = reward_tokenizer
        self.policy = policy
        self.reward_model = RoleWorkers(policy.workers, config.reward_model.model.ulysses_sequence_parallel_size)
        self.verifiers = verifiers
        self.stop_strings = stop_strings
        self.method = method
        self.sources = sources
        self.prompts = prompts
        self.total_steps = total_steps
        self.greedy: Batch | None = None
        """The greedy response to each prompt of the step; with ReMax only."""
        self.dropped_scores = torch.zeros(0)
        """The verifiers' scores of responses that were sampled for the step and dropped, [B']."""
        self._verified: list[tuple[Batch, Verification]] = []

    def state(self) -> dict[str, Any]:
        """What lives longer than a step, as JSON and tensors."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state` returned."""

    def sample(
        self,
        records: Sequence[PromptRecord],
        sampling: SamplingConfig,
        step: int,
        settings: ResponseSettings | None = None,
    ) -> Batch:
        """Generate responses, and have them verified as they end; :meth:`collect_verdicts` waits for the verdicts.

        Their random draws depend on the run's seed, ``step`` and the prompt alone. ``settings`` stand in for
        ``sampling``.
        """
        prompts = [record for record in records for _ in range(sampling.n)]
        verification = self._verification(prompts)
        seed = (self.config.seed << 32) + step
        batch = self.policy.generate(records, sampling, seed, verification.add, settings)
        verification.submit()
        group = torch.tensor([record.uid for record in prompts])
        batch.fill(records=prompts, group=group, learned=torch.ones(len(prompts), dtype=torch.bool))
        self._verified.append((batch, verification))
        return batch

    def _verification(self, prompts: Sequence[PromptRecord]) -> Verification:
        reward = self.config.rollout.multi_turn.reward
        return Verification(prompts, self.tokenizer, self.stop_strings, self.verifiers, reward)

    def collect_verdicts(self) -> None:
        """Wait for the verifiers; fill the columns that are theirs in every batch sampled since the last call."""
        for batch, verification in self._verified:
            verdicts = verification.verdicts()
            scores, correct = score_tensors(verdicts)
            batch.fill(texts=verification.texts, verdicts=verdicts, scores=scores, correct=correct)
        self._verified.clear()

    def sample_step(
        self, prompts: Iterator[list[PromptRecord]], step: int, timer: PhaseTimer
    ) -> tuple[Batch, dict[str, float]]:
        """The responses of one training step, and metrics; the engines' memory is free afterwards."""
        n = self.config.rollout.n
        metrics: dict[str, float] = {}
        self.greedy, self.dropped_scores = None, torch.zeros(0)
        if self.config.algorithm.filter_groups.enable:
            batch, metrics = self._sample_informative(prompts, step, timer)
        else:
            batch = self._sample_batch(prompts, step, 0, timer)
            if FIRST[0] in batch:
                verdicts = batch.first_verdicts
                metrics = verdict_metrics(verdicts, n, data_sources(batch), self.sources)
                metrics |= edited_metrics(batch, n)
        batch.fill(step=torch.full((len(batch),), step))
        if self.config.algorithm.adv_estimator == "remax":
            sampling = replace(self.config.rollout.train_kwargs, n=1, temperature=0.0)
            self.greedy = self._sample_timed(batch.records[::n], sampling, step, timer)
        with timer.phase("gen"):
            self.policy.finish_generation()
        return batch, metrics

    def finish_ahead(self, timer: PhaseTimer) -> None:
        """At the end of a step: wait for what is sampled ahead of the next one. Nothing is, here."""

    def _sample_timed(
        self,
        records: Sequence[PromptRecord],
        sampling: SamplingConfig,
        step: int,
        timer: PhaseTimer,
        settings: ResponseSettings | None = None,
    ) -> Batch:
        with timer.phase("gen"):
            batch = self.sample(records, sampling, step, settings)
        # Prompts, read once for all their responses, are not counted.
        timer.count("gen", Work.of(batch.lengths, batch.prompt_lengths))
        return batch

    def _collect_timed(self, timer: PhaseTimer) -> None:
        with timer.phase("reward"):
            self.collect_verdicts()

    def _sample_batch(self, prompts: Iterator[list[PromptRecord]], step: int, number: int, timer: PhaseTimer) -> Batch:
        """The responses to the next prompts, of which the method may choose some, and edit some again.

        Args:
            number: of this batch among those of the step, from 0.
        """
        sampling, method = self.config.rollout.train_kwargs, self.method
        draws = step + number * REFILL_STEP
        records = method.choose_prompts(next(prompts))
        batch = self._sample_timed(records, sampling, draws, timer, method.settings(records))
        if not method.overrides("judged"):
            return batch
        self._collect_timed(timer)
        first_round = {"first_records": batch.records, "first_verdicts": batch.verdicts}
        for round in range(1, MAX_ROUNDS + 1):
            edited = method.judged(batch, round)
            if not edited:
                break
            records = list(edited.values())
            settings = method.settings(records)
            again = self._sample_timed(records, sampling, draws + round * ROUND_STEP, timer, settings)
            self._collect_timed(timer)
            batch = replace_groups(batch, list(edited), again, sampling.n)
        return batch.fill(**first_round)

    def _sample_informative(
        self, prompts: Iterator[list[PromptRecord]], step: int, timer: PhaseTimer
    ) -> tuple[Batch, dict[str, float]]:
        """Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): the batch, and metrics of all that was sampled.

        Batches are sampled until there are ``data.train_batch_size`` prompts whose responses differ in the metric of
        ``algorithm.filter_groups``, or its ``max_num_gen_batches`` is reached. Prompts without a difference then fill
        the batch up, and are not learned from.

        Raises:
            ConfigError: there is no limit of batches, and ``MAX_FRUITLESS_BATCHES`` held nothing to learn from.
        """
        n, filtering = self.config.rollout.n, self.config.algorithm.filter_groups
        informative: list[Batch] = []
        others: list[Batch] = []
        verdicts: list[Score] = []
        sources: list[str] = []
        size = missing = self.config.data.train_batch_size
        num_batches, limit = 0, filtering.max_num_gen_batches
        while missing > 0 and (limit <= 0 or num_batches < limit):
            batch = self._sample_batch(prompts, step, num_batches, timer)
            with timer.phase("reward"):
                self.collect_verdicts()
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
        self.dropped_scores = dropped.scores
        # A prompt drawn twice in one step makes two groups.
        chosen.fill(group=torch.arange(len(chosen) // n).repeat_interleave(n))
        metrics |= verdict_metrics(verdicts, n, sources, self.sources)
        metrics |= {"train/num_gen_batches": float(num_batches), "train/filler_groups": float(missing)}
        return chosen, metrics

    def _filter_values(self, batch: Batch) -> Tensor:
        """What groups are compared by, [B]."""
        metric = self.config.algorithm.filter_groups.metric
        if metric == "acc":
            return batch.correct
        if metric == "score":
            return batch.scores
        if self.config.uses_reward_model:
            # The reward model needs the memory that the engine holds while it samples; further batches wake it.
            self.policy.finish_generation()
        return self.rewards(batch)[0]

    def rewards(self, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        """The reward of each response, [B] float64, and the means of what was added to the verifier's score.

        The reward is the verifier's score, or its weighted sum with the reward model's, and the overlong penalty.
        """
        config = self.config
        metrics: dict[str, float] = {}
        rewards = batch.scores.double()
        if config.uses_reward_model:
            scores, metrics = self._reward_model_scores(batch)
            rewards = config.reward_model.rule_weight * rewards + config.reward_model.weight * scores
        overlong = config.reward_score.overlong_buffer
        if overlong.enable:
            limit = config.data.max_response_length
            penalty = overlong_penalty(batch.response_lengths, limit, overlong.len, overlong.penalty_factor)
            rewards = rewards + penalty
            metrics["train/overlong_penalty/mean"] = penalty.mean().item()
        return rewards, metrics

    def _reward_model_scores(self, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        assert self.reward_tokenizer is not None, "a run with a reward model loads its tokenizer"
        chats = [record.messages for record in batch.records]
        max_length = self.config.reward_model.max_length
        texts, too_long = reward_model_batch(chats, batch.texts, self.reward_tokenizer, max_length)
        scores = self.reward_model.map_rows("compute_rm_scores", texts).scores.double()
        return scores, {
            "reward_model/score/mean": scores.mean().item(),
            "reward_model/score/std": scores.std(correction=0).item(),
            "reward_model/clip_ratio": too_long,
        }


def nothing_to_learn(metric: str, num_batches: int) -> ConfigError:
    """The error of dynamic sampling that finds nothing."""
    return ConfigError(
        f"algorithm.filter_groups.metric={metric!r}: no prompt of {num_batches} batches has responses that differ, so "
        "there is nothing to learn from; use easier or harder prompts, or set "
        "algorithm.filter_groups.max_num_gen_batches"
    )


def replace_groups(batch: Batch, places: Sequence[int], again: Batch, n: int) -> Batch:
    """``batch`` with the groups of n responses at ``places``, ascending, from ``again``."""
    num = len(batch) // n
    order = torch.arange(num)
    order[torch.tensor(places)] = num + torch.arange(len(places))
    return Batch.join([batch, again])[(order[:, None] * n + torch.arange(n)).flatten()]


def first(batch: Batch, name: str) -> list[Any]:
    """The column ``records`` or ``verdicts`` as it was before ``Method.judged`` replaced any, B."""
    column: list[Any] = getattr(batch, f"first_{name}" if f"first_{name}" in batch else name)
    return column


def data_sources(batch: Batch) -> list[str]:
    """The data source of each response, B."""
    return [record.data_source for record in batch.records]


def edited_metrics(batch: Batch, n: int) -> dict[str, float]:
    """How many prompts ``Method.judged`` edited, and what became of them."""
    pairs = list(zip(batch.records, batch.first_records, strict=True))[::n]
    added = [len(now.input_ids) - len(before.input_ids) for now, before in pairs if now is not before]
    metrics = {"judged/groups": float(len(added))}
    if added:
        edited = torch.tensor([now is not before for now, before in pairs])
        for name, verdicts in (("before", batch.first_verdicts), ("after", batch.verdicts)):
            _, correct = score_tensors(verdicts)
            metrics[f"judged/pass@1/{name}"] = correct.view(len(edited), -1)[edited].double().mean().item()
        metrics["judged/prompt_tokens_added/mean"] = sum(added) / len(added)
    return metrics
