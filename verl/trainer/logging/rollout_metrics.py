"""Logged metrics of a batch of responses; docs/metrics.md lists them.

Legend: B responses, M their tokens, R padded response length, n consecutive responses per prompt, L layers, K turns.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean

import torch
from torch import Tensor

from verl.algorithms.pass_at_k import best_at_k, k_grid, pass_at_k
from verl.algorithms.rollout_correction import mismatch_metrics
from verl.algorithms.votes import answer_classes, majority_at_k
from verl.batch import TRAINER_RANK, Batch
from verl.rank.calculator import RepresentationMetricsCalculator
from verl.rank.dynamics import by_layer
from verl.rewards.custom import extra_metrics
from verl.rollout.environments.pool import COUNTS
from verl.verifiers.answers import vote_key
from verl.verifiers.verdict import Verdict

MAX_SOURCES = 16
"""Maximum number of data sources with separate metrics, some dozens each."""

# --- Lengths and rank metrics ---


def length_metrics(batch: Batch, max_prompt_length: int) -> dict[str, float]:
    """Return prompt and response lengths in tokens.

    ``prompt_length/clip_ratio`` is the share of prompts with ``data.max_prompt_length`` tokens, and
    ``response_length/clip_ratio`` the share of responses truncated at ``data.max_response_length``.
    """
    return {
        **_spread("prompt_length", batch.prompt_lengths),
        "prompt_length/clip_ratio": (batch.prompt_lengths == max_prompt_length).double().mean().item(),
        **_spread("response_length", batch.response_lengths),
        "response_length/clip_ratio": batch.truncated.double().mean().item(),
        **turn_metrics(batch),
    }


def turn_metrics(batch: Batch) -> dict[str, float]:
    """Return metrics of conversations: turns, the environments' tokens and rewards, and counts of tool calls."""
    if "source" not in batch:
        return {}
    written = batch.response_lengths - batch.policy_lengths
    counts = dict(zip(COUNTS, batch.call_counts.sum(dim=0).tolist(), strict=True))
    return {
        **_spread("turns", batch.turns),
        **_spread("environment/tokens", written),
        "environment/tokens/share": (written.sum() / batch.response_lengths.sum()).item(),
        "environment/reward/mean": batch.environment_rewards.mean().item(),
        **{f"environment/{name}": float(count) for name, count in counts.items()},
    }


def response_metrics(
    batch: Batch, calculator: RepresentationMetricsCalculator | None, diff_stride: int
) -> dict[str, float]:
    """Return rank metrics, and the number and lengths of correct and incorrect responses.

    A group without responses is left out; the paper's release logs a length of 0 for it.
    """
    lengths, correct = batch.response_lengths, batch.correct
    metrics = {"cal/num_correct": float(correct.sum()), "cal/num_incorrect": float((~correct).sum())}
    for group, members in {"correct": correct, "incorrect": ~correct}.items():
        if members.any():
            metrics |= _spread(f"response_length/{group}", lengths[members])
            metrics[f"response_length/{group}/clip_ratio"] = batch.truncated[members].double().mean().item()
    metrics |= rank_scalars(batch.rank_metrics, correct) | turn_scalars(batch)
    return metrics | dataset_scalars(batch, calculator, diff_stride)


def rank_scalars(rank_metrics: Mapping[str, Tensor], correct: Tensor) -> dict[str, float]:
    """Return mean, max and min of each rank metric over all, correct and incorrect responses.

    The names are ``cal/{overall,correct,incorrect}/layer_1/Effective Rank/{mean,max,min}`` and so on. Groups without
    responses are left out. Responses with NaN or infinite hidden states are excluded, and counted in
    ``cal/overall/layer_1/nonfinite``.
    """
    groups = {"overall": torch.ones_like(correct), "correct": correct, "incorrect": ~correct}
    scalars = {}
    for layer, metrics in enumerate(by_layer(rank_metrics), start=1):
        finite = torch.stack(list(metrics.values())).isfinite().all(dim=0)
        scalars[f"cal/overall/layer_{layer}/nonfinite"] = float((~finite).sum())
        for name, values in metrics.items():
            for group, members in groups.items():
                scalars |= _spread(f"cal/{group}/layer_{layer}/{name}", values[members & finite])
    return scalars


def turn_scalars(batch: Batch) -> dict[str, float]:
    """Return the mean of each rank metric in turn k, and its mean change from turn k - 1 to turn k.

    The names are ``cal/turn_2/layer_1/Effective Rank/{mean,change}`` and so on.
    """
    scalars = {}
    for name, values in batch.turn_metrics.items():
        for turn, now in enumerate(values.unbind(dim=1)):
            for layer, measured in enumerate(now.unbind(dim=1)):
                full_name, finite = f"cal/turn_{turn + 1}/layer_{layer + 1}/{name}", measured.isfinite()
                if finite.any():
                    scalars[f"{full_name}/mean"] = measured[finite].mean().item()
                if turn and finite.any():
                    changes = (measured - values[:, turn - 1, layer])[finite]
                    scalars[f"{full_name}/change"] = changes[changes.isfinite()].mean().item()
    return scalars


def dataset_scalars(
    batch: Batch, calculator: RepresentationMetricsCalculator | None, diff_stride: int
) -> dict[str, float]:
    """Return rank metrics of each layer's matrix of mean states, ``cal/layer_1/global/Effective Rank`` and so on.

    ``diff_stride`` is the number of responses between two prefixes of the cumulative metrics.
    """
    if calculator is None or "mean_states" not in batch:
        return {}
    mean_states = batch.mean_states
    return {
        f"cal/layer_{layer + 1}/{name}": value
        for layer in range(mean_states.shape[1])
        for name, value in calculator.dataset_metrics(mean_states[:, layer], diff_stride).items()
    }


# --- Learning ---


def filtered_length_metrics(response_mask: Tensor, max_length: int) -> dict[str, float]:
    """Return ``filtered_response_length/{mean,max,min,clip_ratio}``, the lengths of the responses to learn from.

    ``response_mask`` [B, R] has empty rows for truncated responses if ``trainer.remove_clip`` is set. These are
    excluded; the paper's release counts them with length 0. ``clip_ratio`` is the share with ``max_length`` tokens.
    """
    lengths = response_mask.sum(dim=1)
    lengths = lengths[lengths > 0]
    if not lengths.numel():
        return {}
    prefix = "filtered_response_length"
    return _spread(prefix, lengths) | {f"{prefix}/clip_ratio": (lengths == max_length).double().mean().item()}


def learning_metrics(
    of_responses: Mapping[str, Tensor], of_tokens: Mapping[str, Tensor], learn_mask: Tensor
) -> dict[str, float]:
    """Return mean, max and min of rewards, advantages and values under veRL's names, ``critic/...``.

    Args:
        of_responses: name -> [B].
        of_tokens: name -> [B, R]; ``values`` and ``returns`` also give ``critic/vf_explained_var``.
        learn_mask: [B, R] bool, the tokens of ``of_tokens`` that count.
    """
    learned = {name: values[learn_mask] for name, values in of_tokens.items()}
    metrics: dict[str, float] = {}
    for name, values in {**of_responses, **learned}.items():
        metrics |= _spread(f"critic/{name}", values)
    if "values" in learned and learn_mask.any():
        target, error = learned["returns"].double(), (learned["returns"] - learned["values"]).double()
        # Avoid a division by zero if the returns are constant.
        explained = 1 - error.var(correction=0) / (target.var(correction=0) + 1e-5)
        metrics["critic/vf_explained_var"] = explained.item()
    return metrics


def policy_metrics(batch: Batch, rollout_is: str | None, threshold: float) -> dict[str, float]:
    """Return the mismatch between engine and policy, and the policy's mean entropy, all in nats.

    ``rollout/logprob_abs_diff`` is the mean absolute difference of their log-probabilities, ``_max`` the largest; for
    ``rollout_corr/*`` see :func:`verl.algorithms.rollout_correction.mismatch_metrics`.

    Args:
        batch: has ``logprobs`` and ``entropy`` of the policy that sampled it.
        rollout_is, threshold: options of ``algorithm.rollout_correction``.
    """
    pair, mask = (batch.padded("logprobs"), batch.padded("rollout_logprobs")), batch.policy_mask
    level = rollout_is or "token"
    difference = (batch.rollout_logprobs - batch.logprobs)[batch.by_policy].abs().double()
    return {
        "rollout/logprob_abs_diff": difference.mean().item(),
        "rollout/logprob_abs_diff_max": difference.max().item(),
        **with_prefix("rollout_corr", mismatch_metrics(*pair, mask, level, threshold)),
        "actor/entropy": batch.entropy[batch.by_policy].double().mean().item(),
    }


def lag_metrics(batch: Batch, step: int, threshold: float) -> dict[str, float]:
    """Return staleness metrics, ``async/lag/{mean,max}`` and ``async/lag_<k>/...``.

    The lag of a token is the number of updates between the weights that sampled it and the weights that learn from it.
    ``batch`` has ``version``, ``rollout_logprobs``, ``rewards``, and ``logprobs`` of the policy before the update.
    """
    lags = step - 1 - batch.version.long()
    ends = batch.response_lengths.cumsum(dim=0)
    # Versions never decrease along a response; its rank metrics belong to the last version.
    oldest, last = lags[ends - batch.response_lengths], lags[ends - 1]
    sampled = lags[batch.by_policy]
    metrics = {"async/lag/mean": sampled.double().mean().item(), "async/lag/max": float(sampled.max())}
    for lag in sampled.unique().tolist():
        tokens, responses = (lags == lag) & batch.by_policy, oldest == lag
        pair = (batch.logprobs[tokens][None], batch.rollout_logprobs[tokens][None])
        mismatch = mismatch_metrics(*pair, torch.ones_like(pair[0]), "token", threshold)
        by_lag = {
            "tokens": tokens[batch.by_policy].double().mean().item(),
            "kl": mismatch["k3_kl"],
            "eff_sample_size": mismatch["rollout_is_eff_sample_size"],
            "capped": mismatch["rollout_is_ratio_fraction_high"],
        }
        if responses.any():
            by_lag["reward"] = batch.rewards[responses].mean().item()
            by_lag["response_length"] = batch.response_lengths[responses].double().mean().item()
        metrics |= with_prefix(f"async/lag_{lag}", by_lag | version_metrics(batch[last == lag]))
    return metrics


def version_metrics(batch: Batch) -> dict[str, float]:
    """Return the mean (absolute) difference of rank metrics between the policy before the update and the engine.

    Effective rank, velocity and acceleration are compared if ``calculator.compare_versions`` is set.
    """
    metrics = {}
    for name, engine in batch.rank_metrics.items():
        if not (name.startswith("Effective Rank") and TRAINER_RANK + name in batch):
            continue
        changes = getattr(batch, TRAINER_RANK + name) - engine
        for layer, change in enumerate(changes.unbind(dim=1), start=1):
            change = change[change.isfinite()]
            if len(change):
                metrics[f"layer_{layer}/{name}/change"] = change.mean().item()
                metrics[f"layer_{layer}/{name}/abs_change"] = change.abs().mean().item()
    return metrics


# --- Verdicts ---


def score_tensors(verdicts: Sequence[Verdict]) -> tuple[Tensor, Tensor]:
    """Return scores [B] float32 and correctness [B] bool."""
    scores = torch.tensor([verdict.score for verdict in verdicts])
    return scores, torch.tensor([verdict.correct for verdict in verdicts])


def count_reasons(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """Return ``verifier/<reason>``, the number of verdicts by reason."""
    counts = Counter(verdict.reason for verdict in verdicts)
    return {f"verifier/{reason}": float(count) for reason, count in counts.items()}


def score_metrics(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """Return ``pass@1``, ``score/mean``, and means of the values that custom functions returned."""
    scores, correct = score_tensors(verdicts)
    means = {"pass@1": correct.double().mean().item(), "score/mean": scores.double().mean().item()}
    return means | extra_metrics(verdict.extras for verdict in verdicts)


def verdict_metrics(
    verdicts: Sequence[Verdict], n: int, sources: Sequence[str], logged: Sequence[str]
) -> dict[str, float]:
    """Return all metrics of the verdicts on sampled responses.

    These are scores, counts of reasons, the share of prompts whose ``n`` > 1 responses have the same score and thus no
    learning signal, and metrics of the data sources in ``logged``, given the ``sources`` of the responses.
    """
    means = score_metrics(verdicts)
    metrics = {"score/mean": means.pop("score/mean")} | count_reasons(verdicts) | with_prefix("train", means)
    if n > 1:
        differ = groups_that_differ(score_tensors(verdicts)[0], n)
        metrics["train/groups_without_variance"] = (~differ).double().mean().item()
    by_source = metrics_by_source(sources, logged, lambda rows: score_metrics(select(verdicts, rows)))
    return metrics | with_prefix("train", by_source)


def select(verdicts: Sequence[Verdict], rows: Tensor) -> list[Verdict]:
    """Return the verdicts of ``rows`` [B] bool."""
    return [verdicts[i] for i in rows.nonzero().flatten().tolist()]


def groups_that_differ(values: Tensor, n: int) -> Tensor:
    """Return which groups have different ``values`` [B] among their n responses, [B / n] bool."""
    grouped = values.view(-1, n)
    return (grouped != grouped[:, :1]).any(dim=1)


def at_k_metrics(verdicts: Sequence[Verdict], n: int) -> dict[str, float]:
    """Return means over prompts of metrics of k responses, for k = 2, 4, 8, ... and ``n``; empty for ``n`` = 1.

    ``pass@k`` is the probability that one of k responses is correct, ``best@k/mean`` and ``worst@k/mean`` are their
    highest and lowest score, and ``maj@k/mean`` is the probability that a majority vote is correct, left out if
    verifiers extract no answers. Each is the exact mean over all choices of k of the n responses.
    """
    scores, correct = score_tensors(verdicts)
    grouped, num_correct = scores.double().view(-1, n), correct.view(-1, n).sum(dim=1)
    right, answers = correct.tolist(), [vote_key(verdict.answer) for verdict in verdicts]
    votes = [answer_classes(right[i : i + n], answers[i : i + n]) for i in range(0, len(answers), n)]
    num_samples = num_correct.new_full(num_correct.shape, n)
    metrics = {}
    for k in k_grid(n)[1:]:
        metrics[f"pass@{k}"] = pass_at_k(num_samples, num_correct, k).mean().item()
        metrics[f"best@{k}/mean"] = best_at_k(grouped, k).mean().item()
        metrics[f"worst@{k}/mean"] = -best_at_k(-grouped, k).mean().item()
        if any(verdict.answer for verdict in verdicts):
            metrics[f"maj@{k}/mean"] = fmean(majority_at_k(*vote, k) for vote in votes)
    return metrics


# --- Data sources ---


def data_sources(batch: Batch) -> list[str]:
    """Return the data source of each response, B."""
    return [record.data_source for record in batch.records]


def logged_sources(sources: Iterable[str]) -> list[str]:
    """Return the ``MAX_SOURCES`` most frequent data sources, given those of all prompts; empty for a single source."""
    counts = Counter(sources)
    return [source for source, _ in counts.most_common(MAX_SOURCES)] if len(counts) > 1 else []


def metrics_by_source(
    sources: Sequence[str], logged: Sequence[str], metrics_of: Callable[[Tensor], Mapping[str, float]]
) -> dict[str, float]:
    """Return ``<source>/<name>``, the metrics of each source in ``logged`` that occurs, except maxima and minima.

    Args:
        sources: the data source of each response, B.
        metrics_of: returns the metrics of some responses, given as a mask [B] bool.
    """
    metrics: dict[str, float] = {}
    for source in logged:
        rows = torch.tensor([name == source for name in sources])
        if rows.any():
            means = {name: v for name, v in metrics_of(rows).items() if not name.endswith(("/max", "/min"))}
            metrics |= with_prefix(source, means)
    return metrics


def with_prefix(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics with ``prefix/`` before each name."""
    return {f"{prefix}/{name}": value for name, value in metrics.items()}


def _spread(prefix: str, values: Tensor) -> dict[str, float]:
    """Return ``prefix/{mean,max,min}`` of ``values``; empty without values."""
    if not values.numel():
        return {}
    values = values.double()
    return {
        f"{prefix}/mean": values.mean().item(),
        f"{prefix}/max": values.max().item(),
        f"{prefix}/min": values.min().item(),
    }
