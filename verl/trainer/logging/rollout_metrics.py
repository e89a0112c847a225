"""Metrics to log for a batch of responses, as listed in docs/metrics.md.

Legend: B responses, M response tokens, R padded response length, n consecutive responses per prompt, L layers, K turns.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean

import torch
from torch import Tensor

from verl.algorithms.pass_at_k import best_at_k, k_grid, pass_at_k
from verl.algorithms.rollout_correction import mismatch_metrics
from verl.algorithms.votes import answer_classes, majority_at_k
from verl.batch import TEACHER_RANK, TRAINER_RANK, Batch
from verl.batch.flat import sums_within
from verl.rank.calculator import RepresentationMetricsCalculator
from verl.rank.dynamics import by_layer
from verl.rewards.custom import extra_metrics
from verl.rewards.registry import adds_judge
from verl.rollout.environments.pool import COUNTS
from verl.verifiers.answers import vote_key
from verl.verifiers.verdict import Verdict

MAX_SOURCES = 16
"""Maximum number of data sources with separate metrics. Each source adds a few dozen metrics."""

# --- Lengths and rank metrics ---


def length_metrics(batch: Batch, max_prompt_length: int) -> dict[str, float]:
    """Return metrics of prompt and response lengths in tokens.

    ``prompt_length/clip_ratio`` is the fraction of prompts with ``data.max_prompt_length`` tokens, and
    ``response_length/clip_ratio`` is the fraction of responses truncated at ``data.max_response_length``.
    """
    return {
        **_spread("prompt_length", batch.prompt_lengths),
        "prompt_length/clip_ratio": (batch.prompt_lengths == max_prompt_length).double().mean().item(),
        **_spread("response_length", batch.response_lengths),
        "response_length/clip_ratio": batch.truncated.double().mean().item(),
        **turn_metrics(batch),
    }


def turn_metrics(batch: Batch) -> dict[str, float]:
    """Return metrics of conversations: turns, environment tokens, environment rewards and tool calls."""
    if "source" not in batch:
        return {}
    written = batch.response_lengths - batch.policy_lengths
    counts = dict(zip(COUNTS, batch.call_counts.sum(dim=0).tolist(), strict=True))
    agents = {}
    if "further_rows" in batch:
        others = [row["why"] for rows in batch.further_rows for row in rows]
        why = Counter(filter(None, [*others, *batch.opened_by]))
        agents = {"agent/histories/mean": 1 + len(others) / len(batch)}
        agents |= {f"agent/further_histories/{reason}": float(count) for reason, count in sorted(why.items())}
    return {
        **agents,
        **_spread("turns", batch.turns),
        **_spread("environment/tokens", written),
        "environment/tokens/share": (written.sum() / batch.response_lengths.sum()).item(),
        "environment/reward/mean": batch.environment_rewards.mean().item(),
        **{f"environment/{name}": float(count) for name, count in counts.items()},
    }


def response_metrics(
    batch: Batch, calculator: RepresentationMetricsCalculator | None, diff_stride: int
) -> dict[str, float]:
    """Return rank metrics, and the numbers and lengths of correct and incorrect responses.

    Metrics of subsets without responses are omitted, whereas the paper's release logs a length of 0.
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
    """Return the mean, max and min of each rank metric over all, correct and incorrect responses.

    Names look like ``cal/{overall,correct,incorrect}/layer_1/Effective Rank/{mean,max,min}``. Subsets without responses
    are omitted. Responses with NaN or infinite hidden states are excluded and counted in
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
    """Return the mean of each rank metric per turn, and its mean change since the previous turn.

    Names look like ``cal/turn_2/layer_1/Effective Rank/{mean,change}``.
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
    """Return rank metrics of the matrix of mean states of each layer, named like ``cal/layer_1/global/Effective Rank``.

    ``diff_stride`` is the number of responses between consecutive prefixes of the cumulative metrics.
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


def filtered_length_metrics(batch: Batch, max_length: int) -> dict[str, float]:
    """Return ``filtered_response_length/{mean,max,min,clip_ratio}`` over the responses that the policy trains on.

    With ``trainer.remove_clip``, truncated responses are masked out and not counted, whereas the paper's release counts
    them as length 0. ``clip_ratio`` is the fraction of responses with ``max_length`` tokens.
    """
    lengths = sums_within(batch.learn_mask.long(), batch.response_lengths)
    lengths = lengths[lengths > 0]
    if not lengths.numel():
        return {}
    prefix = "filtered_response_length"
    return _spread(prefix, lengths) | {f"{prefix}/clip_ratio": (lengths == max_length).double().mean().item()}


def learning_metrics(
    of_responses: Mapping[str, Tensor], of_tokens: Mapping[str, Tensor], learn_mask: Tensor
) -> dict[str, float]:
    """Return the mean, max and min of rewards, advantages and values, named ``critic/...`` as in veRL.

    Args:
        of_responses: Values per response, [B] by name.
        of_tokens: Values per token, [B, R] by name. ``values`` also yield ``critic/vf_explained_var``.
        learn_mask: Mask of the tokens to include, [B, R] bool.
    """
    learned = {name: values[learn_mask] for name, values in of_tokens.items()}
    metrics: dict[str, float] = {}
    for name, values in {**of_responses, **learned}.items():
        metrics |= _spread(f"critic/{name}", values)
    if "values" in learned and learn_mask.any():
        target, error = learned["returns"].double(), (learned["returns"] - learned["values"]).double()
        # Avoid division by zero if the returns are constant.
        explained = 1 - error.var(correction=0) / (target.var(correction=0) + 1e-5)
        metrics["critic/vf_explained_var"] = explained.item()
    return metrics


def policy_metrics(batch: Batch, rollout_is: str | None, cap: float, floor: float = 0.0) -> dict[str, float]:
    """Return metrics of the mismatch between rollout engine and policy, and the policy's mean entropy in nats.

    ``rollout/logprob_abs_diff`` is the mean absolute difference in nats between the log-probabilities of engine and
    policy, and ``rollout/logprob_abs_diff_max`` is the maximum. For ``rollout_corr/*``, see :func:`mismatch_metrics`.

    Args:
        batch: Batch with the ``logprobs`` and ``entropy`` of the policy that sampled it.
        rollout_is, cap, floor: Options from ``algorithm.rollout_correction``.
    """
    pair, mask = (batch.padded("logprobs"), batch.padded("rollout_logprobs")), batch.policy_mask
    level = rollout_is or "token"
    difference = (batch.rollout_logprobs - batch.logprobs)[batch.by_policy].abs().double()
    return {
        "rollout/logprob_abs_diff": difference.mean().item(),
        "rollout/logprob_abs_diff_max": difference.max().item(),
        **with_prefix("rollout_corr", mismatch_metrics(*pair, mask, level, cap, floor)),
        "actor/entropy": batch.entropy[batch.by_policy].double().mean().item(),
    }


def lag_metrics(batch: Batch, step: int, cap: float, floor: float = 0.0) -> dict[str, float]:
    """Return the staleness metrics ``async/lag/{mean,max}`` and ``async/lag_<k>/...``.

    The lag of a token is the number of policy updates between sampling the token and training on it. ``batch`` must
    contain ``version``, ``rollout_logprobs``, ``rewards``, and the pre-update policy's ``logprobs``.
    """
    lags = step - 1 - batch.version.long()
    ends = batch.response_lengths.cumsum(dim=0)
    # Versions never decrease within a response, and rank metrics are attributed to the last version.
    oldest, last = lags[ends - batch.response_lengths], lags[ends - 1]
    sampled = lags[batch.by_policy]
    metrics = {"async/lag/mean": sampled.double().mean().item(), "async/lag/max": float(sampled.max())}
    for lag in sampled.unique().tolist():
        tokens, responses = (lags == lag) & batch.by_policy, oldest == lag
        pair = (batch.logprobs[tokens][None], batch.rollout_logprobs[tokens][None])
        mismatch = mismatch_metrics(*pair, torch.ones_like(pair[0]), "token", cap, floor)
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
    """Return the mean and mean absolute difference in rank metrics between the pre-update policy and the engine.

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


def teacher_metrics(batch: Batch) -> dict[str, float]:
    """Return the mean of log p - log q over the sampled tokens, in nats, and the teacher's mean rank metrics.

    Here p is the policy before the update and q is the teacher. Rank metrics are named like the policy's:
    ``teacher/layer_1/Effective Rank/mean`` corresponds to ``cal/overall/layer_1/Effective Rank/mean``.
    """
    metrics: dict[str, float] = {}
    if "teacher_logprobs" in batch:
        differences, taught = (batch.old_logprobs - batch.teacher_logprobs).double(), batch.by_policy
        if "taught" in batch:
            taught = taught & batch.taught.repeat_interleave(batch.response_lengths)
        metrics |= {"teacher/reverse_kl": differences[taught].mean().item()} if taught.any() else {}
    if "taught" in batch:
        metrics["teacher/taught_share"] = batch.taught.double().mean().item()
    for column in batch.names:
        if column.startswith(TEACHER_RANK):
            for layer, values in enumerate(getattr(batch, column).unbind(dim=1), start=1):
                name = f"teacher/layer_{layer}/{column.removeprefix(TEACHER_RANK)}"
                metrics[f"{name}/mean"] = values.mean().item()
    return metrics


# --- Verdicts ---


def score_tensors(verdicts: Sequence[Verdict]) -> tuple[Tensor, Tensor]:
    """Return the scores of verdicts, [B] float32, and whether each response is correct, [B] bool."""
    scores = torch.tensor([verdict.score for verdict in verdicts])
    return scores, torch.tensor([verdict.correct for verdict in verdicts])


def count_reasons(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """Return the number of verdicts for each reason, named ``verifier/<reason>``."""
    counts = Counter(verdict.reason for verdict in verdicts)
    return {f"verifier/{reason}": float(count) for reason, count in counts.items()}


def score_metrics(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """Return ``pass@1``, ``score/mean``, judge metrics, and statistics of values returned by custom functions."""
    scores, correct = score_tensors(verdicts)
    means = {"pass@1": correct.double().mean().item(), "score/mean": scores.double().mean().item()}
    return means | judge_metrics(verdicts) | extra_metrics(verdict.extras for verdict in verdicts)


def judge_metrics(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """Return the judge's mean score and the fraction of responses that it failed to score, or {} without a judge.

    Values are read only if there is a judge, because custom functions may return values with the same names.
    """
    values = [verdict.extras.get("judge") for verdict in verdicts]
    scores = [value for value in values if isinstance(value, float) and math.isfinite(value)]
    num_failed = sum("judge_failed" in verdict.extras for verdict in verdicts)
    if not (adds_judge() and (scores or num_failed)):
        return {}
    means = {"judge/score/mean": fmean(scores)} if scores else {}
    return means | {"judge/failed_share": num_failed / (num_failed + len(scores))}


def verdict_metrics(
    verdicts: Sequence[Verdict], n: int, sources: Sequence[str], logged: Sequence[str]
) -> dict[str, float]:
    """Return all metrics of the verdicts on sampled responses.

    These include scores, the number of verdicts per reason, the fraction of prompts whose scores are all equal if ``n``
    > 1, and metrics of each data source in ``logged``. ``sources`` contains each response's data source.
    """
    means = score_metrics(verdicts)
    metrics = {"score/mean": means.pop("score/mean")} | count_reasons(verdicts) | with_prefix("train", means)
    if n > 1:
        differ = groups_that_differ(score_tensors(verdicts)[0], n)
        metrics["train/groups_without_variance"] = (~differ).double().mean().item()
    by_source = metrics_by_source(sources, logged, lambda rows: score_metrics(select(verdicts, rows)))
    return metrics | with_prefix("train", by_source)


def select(verdicts: Sequence[Verdict], rows: Tensor) -> list[Verdict]:
    """Return the verdicts selected by the bool mask ``rows`` [B]."""
    return [verdicts[i] for i in rows.nonzero().flatten().tolist()]


def groups_that_differ(values: Tensor, n: int) -> Tensor:
    """Return a bool mask [B / n] of the groups whose n responses have different ``values`` [B]."""
    grouped = values.view(-1, n)
    return (grouped != grouped[:, :1]).any(dim=1)


def at_k_metrics(verdicts: Sequence[Verdict], n: int) -> dict[str, float]:
    """Return pass@k and similar metrics for k = 2, 4, 8, ... and ``n``, or an empty dict if ``n`` is 1.

    ``pass@k`` is the probability that at least one of k responses is correct, ``best@k/mean`` and ``worst@k/mean`` are
    their highest and lowest scores, and ``maj@k/mean`` is the probability that a majority vote is correct (omitted if
    verifiers extract no answers). Each metric is the exact mean over all subsets of k responses, averaged over prompts.
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
    return [record.data_source for record in batch.records]


def logged_sources(sources: Iterable[str]) -> list[str]:
    """Return the ``MAX_SOURCES`` most frequent data sources, or an empty list if there is only one source."""
    counts = Counter(sources)
    return [source for source, _ in counts.most_common(MAX_SOURCES)] if len(counts) > 1 else []


def metrics_by_source(
    sources: Sequence[str], logged: Sequence[str], metrics_of: Callable[[Tensor], Mapping[str, float]]
) -> dict[str, float]:
    """Return the metrics of each data source in ``logged``, named ``<source>/<name>``, without maxima and minima.

    Args:
        sources: Data source of each of the B responses.
        metrics_of: Function that returns the metrics of the responses selected by a mask [B] bool.
    """
    metrics: dict[str, float] = {}
    for source in logged:
        rows = torch.tensor([name == source for name in sources])
        if rows.any():
            means = {name: v for name, v in metrics_of(rows).items() if not name.endswith(("/max", "/min"))}
            metrics |= with_prefix(source, means)
    return metrics


def with_prefix(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Prepend ``prefix/`` to the name of each metric."""
    return {f"{prefix}/{name}": value for name, value in metrics.items()}


def _spread(prefix: str, values: Tensor) -> dict[str, float]:
    """Return ``prefix/{mean,max,min}`` of ``values``, or an empty dict if there are no values."""
    if not values.numel():
        return {}
    values = values.double()
    return {
        f"{prefix}/mean": values.mean().item(),
        f"{prefix}/max": values.max().item(),
        f"{prefix}/min": values.min().item(),
    }
