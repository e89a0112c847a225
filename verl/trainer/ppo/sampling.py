"""Prompts in, scored responses out: generation, verification, and dynamic sampling.

Legend: G prompts, n responses to each, B = G n responses, neighbours where they share a prompt.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verl.algorithms.overlong import overlong_penalty
from verl.config.errors import ConfigError
from verl.config.ppo import PPOConfig
from verl.config.rollout import SamplingConfig
from verl.data.prompts import TokenizedPrompts
from verl.data.samplers import StepOutcome
from verl.models.reward_model_inputs import reward_model_batch
from verl.protocol import RolloutBatch
from verl.rewards import Score
from verl.rewards.extras import extra_metrics
from verl.rewards.pool import PendingScores, VerifierPool
from verl.rollout.requests import ResponseSettings
from verl.single_controller.roles import RewardModelWorkers
from verl.single_controller.worker_group import WorkerGroup
from verl.trainer.logging.rollout_metrics import group_metrics, with_prefix
from verl.trainer.logging.source_metrics import metrics_by_source, verdict_figures
from verl.trainer.logging.timing import PhaseTimer, Work
from verl.trainer.ppo.adapt import PolicyWorkers
from verl.trainer.ppo.hooks import SamplingHooks
from verl.trainer.ppo.sampled import FirstRound, Sampled, finished, join, replaced, select
from verl.trainer.ppo.verification import Verification

VALIDATION_STEP = 1 << 20
"""Takes the place of the step in the seed of validation: the same at every validation, and never used in training."""

MAX_FRUITLESS_BATCHES = 100
"""Batches of one step without a group to learn from after which a run without a limit of batches ends."""

ROUND_STEP = 1 << 29
"""Added to the step in the seed for each time that a prompt is sampled again."""

REFILL_STEP = 1 << 21
"""Added to the step in the seed for each further batch of a step, so that a prompt drawn twice gets new responses."""


class StepSample(NamedTuple):
    """What one training step learns from."""

    sampled: Sampled
    fresh: Sampled
    """What was sampled for the step; ``sampled`` itself, unless ``algorithm.recompose`` made that."""
    dropped_scores: Tensor
    """The verifiers' scores of responses that were generated and dropped, [B']."""
    greedy: Sampled | None
    """The greedy response to each prompt; with ReMax only."""
    metrics: dict[str, float]


class Sampler:
    """Drives rollout engines, verifiers and the reward model."""

    def __init__(
        self,
        config: PPOConfig,
        tokenizer: PreTrainedTokenizerBase,
        reward_tokenizer: PreTrainedTokenizerBase | None,
        workers: WorkerGroup,
        verifiers: VerifierPool,
        stop_strings: Sequence[str],
        sources: Sequence[str] = (),
        hooks: SamplingHooks | None = None,
    ) -> None:
        """
        Args:
            reward_tokenizer: the reward model's; None without one.
            stop_strings: strings that end a response; they are not part of the text that is scored.
            sources: the training data's with figures of their own (``logged_sources``).
            hooks: the user's own classes; None where nothing is trained.
        """
        self.config = config
        self.tokenizer = tokenizer
        self.reward_tokenizer = reward_tokenizer
        self.policy = PolicyWorkers(workers, config)
        self.reward_model = RewardModelWorkers(workers, config)
        self.verifiers = verifiers
        self.stop_strings = stop_strings
        self.sources = sources
        self.hooks = hooks or SamplingHooks(config, 0, (), tokenizer)

    def sample(
        self,
        prompts: TokenizedPrompts,
        sampling: SamplingConfig,
        step: int,
        settings: ResponseSettings | None = None,
    ) -> Sampled:
        """Generate responses, and verify them as they end.

        Their random draws depend on the run's seed, ``step`` and the prompt alone. ``settings`` of each stand in for
        ``sampling``.
        """
        records = [record for record in prompts.records for _ in range(sampling.n)]
        verification = Verification(records, self.tokenizer, self.stop_strings, self.verifiers)
        seed, pad = (self.config.seed << 32) + step, self.tokenizer.pad_token_id
        given = [] if settings is None else [settings]
        rollout = self.policy.generate(prompts.tokens, sampling, seed, pad, verification.add, *given)
        return Sampled(prompts, rollout, *verification.finish(), torch.ones(len(rollout), dtype=torch.bool))

    def sample_step(self, prompts: Iterator[TokenizedPrompts], step: int, timer: PhaseTimer) -> StepSample:
        """The responses of one training step; the engines' memory is free afterwards."""
        if self.config.algorithm.filter_groups.enable:
            sampled, dropped_scores, metrics = self._sample_informative(prompts, step, timer)
        else:
            sampled = self._sample_batch(prompts, step, 0, timer)
            dropped_scores, metrics = torch.zeros(0), {}
            if sampled.first is not None:
                ids, sources = sampled.rollout.group_ids, sampled.sources
                metrics = verdict_metrics(sampled.first_results, ids, sources, self.sources)
                metrics |= regeneration_metrics(sampled)
        greedy = None
        if self.config.algorithm.adv_estimator == "remax":
            sampling = replace(self.config.rollout.train_kwargs, n=1, temperature=0.0)
            greedy = self._sample_timed(sampled.prompts, sampling, step, timer)
        with timer.phase("gen"):
            self.policy.finish_generation()
        learned = sampled
        if self.hooks.recomposer is not None:
            with timer.phase("reward"):
                sampled.pending.result()
            with timer.phase("recompose"):
                learned, recomposed = self.hooks.recomposer.recompose(sampled, step)
            metrics |= recomposed
        return StepSample(learned, sampled, dropped_scores, greedy, metrics)

    def _sample_timed(
        self,
        prompts: TokenizedPrompts,
        sampling: SamplingConfig,
        step: int,
        timer: PhaseTimer,
        settings: ResponseSettings | None = None,
    ) -> Sampled:
        with timer.phase("gen"):
            sampled = self.sample(prompts, sampling, step, settings)
        timer.count("gen", generated(sampled.rollout))
        return sampled

    def _sample_batch(self, prompts: Iterator[TokenizedPrompts], step: int, number: int, timer: PhaseTimer) -> Sampled:
        """The responses to the next prompts, which ``data.selector`` may choose and ``rollout.regenerate`` edit.

        Args:
            number: of this batch among those of the step, from 0.
        """
        sampling, regenerator = self.config.rollout.train_kwargs, self.hooks.regenerator
        draws = step + number * REFILL_STEP
        chosen = self.hooks.choose(next(prompts), step)
        sampled = self._sample_timed(chosen, sampling, draws, timer, self.hooks.settings(chosen, step))
        if regenerator is None:
            return sampled
        with timer.phase("reward"):
            sampled = replace(sampled, first=FirstRound(sampled.prompts.records, sampled.pending.result()))
        for round_number in range(1, regenerator.max_rounds + 1):
            with timer.phase("reward"):
                scores, correct, _ = score_tensors(sampled.pending)
            judged = (scores.view(-1, sampling.n), correct.view(-1, sampling.n), grouped(sampled.texts, sampling.n))
            records = sampled.prompts.records
            places, edited = regenerator.edit(round_number, step, sampled.first_records, records, judged)
            if edited is None:
                break
            settings = self.hooks.settings(edited, step)
            again = self._sample_timed(edited, sampling, draws + round_number * ROUND_STEP, timer, settings)
            with timer.phase("reward"):
                sampled = replaced(sampled, places, again)
        return sampled

    def _sample_informative(
        self, prompts: Iterator[TokenizedPrompts], step: int, timer: PhaseTimer
    ) -> tuple[Sampled, Tensor, dict[str, float]]:
        """Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2).

        Batches are sampled until there are ``data.train_batch_size`` prompts whose responses differ in the metric of
        ``algorithm.filter_groups``, or its ``max_num_gen_batches`` is reached. Prompts without a difference then fill
        the batch up, and are not learned from.

        Raises:
            ConfigError: there is no limit of batches, and ``MAX_FRUITLESS_BATCHES`` held nothing to learn from.

        Returns:
            The batch, the scores of the responses that were dropped, and metrics of all that was sampled.
        """
        sampling, filtering = self.config.rollout.train_kwargs, self.config.algorithm.filter_groups
        informative: list[Sampled] = []
        others: list[Sampled] = []
        results: list[Score] = []
        sources: list[str] = []
        size = missing = self.config.data.train_batch_size
        num_batches, limit = 0, filtering.max_num_gen_batches
        while missing > 0 and (limit <= 0 or num_batches < limit):
            sampled = self._sample_batch(prompts, step, num_batches, timer)
            with timer.phase("reward"):
                values = self._filter_values(sampled)
            num_batches += 1
            results += sampled.first_results
            sources += sampled.sources
            differs = groups_that_differ(values, sampling.n)
            taken = differs & (differs.cumsum(dim=0) <= missing)
            informative.append(select(sampled, taken.nonzero().flatten(), sampling.n))
            others.append(select(sampled, (~taken).nonzero().flatten(), sampling.n))
            missing -= int(taken.sum())
            if limit <= 0 and missing == size and num_batches == MAX_FRUITLESS_BATCHES:
                raise ConfigError(
                    f"algorithm.filter_groups.metric={filtering.metric!r}: no prompt of {num_batches} batches has "
                    "responses that differ, so there is nothing to learn from; use easier or harder prompts, or set "
                    "algorithm.filter_groups.max_num_gen_batches"
                )
        kept, dropped = join(informative), join(others)
        regenerated = {} if kept.first is None else regeneration_metrics(join([kept, dropped]))
        if missing:
            filler = select(dropped, torch.arange(missing), sampling.n)
            kept = join([kept, replace(filler, learned=torch.zeros_like(filler.learned))])
            dropped = select(dropped, torch.arange(missing, len(dropped.prompts.records)), sampling.n)
        # A prompt drawn twice in one step makes two groups.
        group_ids = torch.arange(len(kept.prompts.records)).repeat_interleave(sampling.n)
        kept = replace(kept, rollout=kept.rollout.replace(group_ids=group_ids))
        group_ids = torch.arange(len(results) // sampling.n).repeat_interleave(sampling.n)
        metrics = verdict_metrics(results, group_ids, sources, self.sources)
        metrics |= regenerated | {"train/num_gen_batches": float(num_batches), "train/filler_groups": float(missing)}
        return kept, score_tensors(dropped.pending)[0], metrics

    def _filter_values(self, sampled: Sampled) -> Tensor:
        """What groups are compared by, [B]."""
        scores, correct, _ = score_tensors(sampled.pending)
        metric = self.config.algorithm.filter_groups.metric
        if metric in ("acc", "score"):
            return correct if metric == "acc" else scores
        if self.config.uses_reward_model:
            # The reward model needs the memory that the engine holds while it samples; further batches wake it.
            self.policy.finish_generation()
        return self.rewards(sampled)[0]

    def rewards(self, sampled: Sampled) -> tuple[Tensor, dict[str, float]]:
        """The reward of each response, [B] float64, and the means of what was added to the verifier's score.

        The reward is the verifier's score, or its weighted sum with the reward model's, and the overlong penalty.
        """
        config = self.config
        metrics: dict[str, float] = {}
        rewards = score_tensors(sampled.pending)[0].double()
        if config.uses_reward_model:
            scores, metrics = self._reward_model_scores(sampled)
            rewards = config.reward_model.rule_weight * rewards + config.reward_model.weight * scores
        overlong = config.reward_score.overlong_buffer
        if overlong.enable:
            lengths = sampled.rollout.response_mask.sum(dim=1)
            limit = config.data.max_response_length
            penalty = overlong_penalty(lengths, limit, overlong.len, overlong.penalty_factor)
            rewards = rewards + penalty
            metrics["train/overlong_penalty/mean"] = penalty.mean().item()
        return rewards, metrics

    def _reward_model_scores(self, sampled: Sampled) -> tuple[Tensor, dict[str, float]]:
        assert self.reward_tokenizer is not None, "a run with a reward model loads its tokenizer"
        records, texts = sampled.prompts.records, sampled.texts
        n = len(texts) // len(records)
        chats = [record.messages for record in records for _ in range(n)]
        batch, too_long = reward_model_batch(chats, texts, self.reward_tokenizer, self.config.reward_model.max_length)
        scores = self.reward_model.compute_scores(batch).double()
        return scores, {
            "reward_model/score/mean": scores.mean().item(),
            "reward_model/score/std": scores.std(correction=0).item(),
            "reward_model/clip_ratio": too_long,
        }


def step_outcome(step: int, sampled: Sampled, metrics: Mapping[str, float]) -> StepOutcome:
    """How the prompts of a step went."""
    scores, correct, _ = score_tensors(finished(sampled.first_results))
    records = sampled.first_records
    means, accuracy = (values.double().view(len(records), -1).mean(dim=1).tolist() for values in (scores, correct))
    return StepOutcome(step, [record.uid for record in records], means, accuracy, dict(metrics), tuple(records))


def regeneration_metrics(sampled: Sampled) -> dict[str, float]:
    """How many prompts ``rollout.regenerate`` edited, and what became of them."""
    pairs = zip(sampled.prompts.records, sampled.first_records, strict=True)
    added = [len(now.input_ids) - len(before.input_ids) for now, before in pairs if now is not before]
    places = [now is not before for now, before in zip(sampled.prompts.records, sampled.first_records, strict=True)]
    metrics = {"regenerate/groups": float(len(added))}
    if added:
        edited = torch.tensor(places)
        for name, results in (("before", sampled.first_results), ("after", sampled.pending.result())):
            _, correct, _ = score_tensors(finished(results))
            metrics[f"regenerate/pass@1/{name}"] = correct.view(len(edited), -1)[edited].double().mean().item()
        metrics["regenerate/prompt_tokens_added/mean"] = sum(added) / len(added)
    return metrics


def grouped(texts: Sequence[str], n: int) -> list[list[str]]:
    """Every ``n`` neighbours together."""
    return [list(texts[i : i + n]) for i in range(0, len(texts), n)]


def score_tensors(pending: PendingScores) -> tuple[Tensor, Tensor, dict[str, int]]:
    """Scores [B] float32, correctness [B] bool, and the count of each reason for a verdict."""
    results = pending.result()
    scores = torch.tensor([result["score"] for result in results])
    counts = Counter(result["reason"] for result in results)
    return scores, torch.tensor([result["correctness"] for result in results]), counts


def verdict_metrics(
    results: list[Score], group_ids: Tensor, sources: Sequence[str], logged: Sequence[str]
) -> dict[str, float]:
    """Everything that the verdicts on responses say, in the groups ``group_ids [B]``: scores, the count of each reason,
    what custom functions returned, and the same by data source (``logged`` of the responses' ``sources``)."""
    scores, correct, counts = score_tensors(finished(results))

    def describe(rows: Tensor) -> dict[str, float]:
        chosen = [results[i] for i in rows.nonzero().flatten().tolist()]
        return verdict_figures(scores[rows], correct[rows], chosen)

    metrics = group_metrics(scores, correct, group_ids)
    metrics |= {f"verifier/{reason}": float(count) for reason, count in counts.items()}
    metrics |= with_prefix("train", extra_metrics(result["reward_extra_info"] for result in results))
    return metrics | with_prefix("train", metrics_by_source(sources, logged, describe))


def groups_that_differ(values: Tensor, n: int) -> Tensor:
    """Whether the ``n`` values of a group differ, [G] bool, for ``values [G n]``."""
    grouped = values.view(-1, n)
    return (grouped != grouped[:, :1]).any(dim=1)


def generated(rollout: RolloutBatch) -> Work:
    """The sampled tokens with their context. Prompts, read once for all their responses, are not counted."""
    response = rollout.response_mask.sum(dim=1)
    length = rollout.attention_mask.sum(dim=1)
    return Work.of(length, length - response)
