"""Figures of a batch of responses, as they are logged; docs/metrics.md lists them.

Legend: B responses, R response columns, n responses to each prompt, neighbours in the batch.
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
"""Data sources with figures of their own. Each has some dozens."""

# --- Lengths and rank metrics ---


def length_metrics(batch: Batch, max_prompt_length: int) -> dict[str, float]:
    """Prompt and response lengths in tokens, and the share of each at its limit.

    ``prompt_length/clip_ratio`` is the share of prompts as long as ``data.max_prompt_length``,
    ``response_length/clip_ratio`` that of responses cut at ``data.max_response_length``.
    """
    return {
        **_spread("prompt_length", batch.prompt_lengths),
        "prompt_length/clip_ratio": (batch.prompt_lengths == max_prompt_length).double().mean().item(),
        **_spread("response_length", batch.response_lengths),
        "response_length/clip_ratio": batch.truncated.double().mean().item(),
        **turn_metrics(batch),
    }


def turn_metrics(batch: Batch) -> dict[str, float]:
    """Return metrics of conversations.

    These are ``turns/{mean,max,min}``, tokens that environments wrote per response and their share,
    ``environment/tokens/...``, their rewards, and sums of :data:`verl.rollout.environments.pool.COUNTS`.
    """
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
    """Rank metrics, and numbers and lengths of correct and incorrect responses.

    ``cal/{num_correct,num_incorrect}`` and ``response_length/{correct,incorrect}/{mean,max,min,clip_ratio}``. A group
    without responses is left out; the release logs a length of 0, which no response has.
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
    """Mean, max and min of every rank metric over all, the correct and the incorrect responses.

    ``cal/{overall,correct,incorrect}/layer_1/Effective Rank/{mean,max,min}`` and so on; a group without responses is
    left out. Responses whose hidden states held NaN or infinity are left out too and counted in
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
    """Return rank metrics by turn: means over the k-th turns, and changes from each turn to the next.

    The names are ``cal/turn_1/layer_1/Effective Rank/mean`` and so on, and ``cal/turn_2/layer_1/Effective
    Rank/change``, over conversations that have both turns.
    """
    scalars = {}
    for name, values in batch.turn_metrics.items():
        for turn, now in enumerate(values.unbind(dim=1)):
            for layer, measured in enumerate(now.unbind(dim=1)):
                where, there = f"cal/turn_{turn + 1}/layer_{layer + 1}/{name}", measured.isfinite()
                if there.any():
                    scalars[f"{where}/mean"] = measured[there].mean().item()
                if turn and there.any():
                    changes = (measured - values[:, turn - 1, layer])[there]
                    scalars[f"{where}/change"] = changes[changes.isfinite()].mean().item()
    return scalars


def dataset_scalars(
    batch: Batch, calculator: RepresentationMetricsCalculator | None, diff_stride: int
) -> dict[str, float]:
    """Return rank metrics of each layer's matrix of mean states, ``cal/layer_1/global/Effective Rank`` and so on.

    None without a calculator.

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
    """Lengths of the responses that are learned from, ``filtered_response_length/{mean,max,min,clip_ratio}``.

    ``response_mask [B, R]`` after ``trainer.remove_clip`` emptied the rows of truncated responses. Those rows do not
    count (in the release they do, with length 0), so nothing is logged where all were emptied. ``clip_ratio`` is the
    share with ``max_length`` tokens.
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
    """Mean, max and min of what the update learns from, under ``critic/``, as in veRL.

    Args:
        of_responses: name -> [B].
        of_tokens: name -> [B, R], of which the learned tokens count; the critic's ``values`` come with ``returns``,
            and both give ``vf_explained_var``.
        learn_mask: [B, R] bool.
    """
    learned = {name: values[learn_mask] for name, values in of_tokens.items()}
    metrics: dict[str, float] = {}
    for name, values in {**of_responses, **learned}.items():
        metrics |= _spread(f"critic/{name}", values)
    if "values" in learned and learn_mask.any():
        target, error = learned["returns"].double(), (learned["returns"] - learned["values"]).double()
        # The addend keeps constant returns from a division by zero.
        explained = 1 - error.var(correction=0) / (target.var(correction=0) + 1e-5)
        metrics["critic/vf_explained_var"] = explained.item()
    return metrics


def policy_metrics(batch: Batch, rollout_is: str | None, threshold: float) -> dict[str, float]:
    """How far the engine was from the policy, in nats, and the policy's mean entropy, ``actor/entropy``.

    ``rollout/logprob_abs_diff`` is the mean difference of their log-probabilities, ``_max`` the largest; for
    ``rollout_corr/*`` see :func:`verl.algorithms.rollout_correction.mismatch_metrics`.

    Args:
        batch: with ``logprobs`` and ``entropy`` of the policy that sampled it.
        rollout_is, threshold: level and cap of the weights, as in ``algorithm.rollout_correction``.
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
    """Return metrics of staleness, ``async/lag/{mean,max}`` and ``async/lag_<k>/...``; docs/metrics.md.

    A token is as many versions behind as the weights that learn from it have learned since they sampled it.

    Args:
        batch: of ``step``, with ``version``, ``rollout_logprobs``, ``logprobs`` of the policy before the update, and
            ``rewards``.
    """
    lags = step - 1 - batch.version.long()
    ends = batch.response_lengths.cumsum(dim=0)
    # Versions only rise along a response, and its rank metrics are of the last.
    oldest, last = lags[ends - batch.response_lengths], lags[ends - 1]
    sampled = lags[batch.by_policy]
    metrics = {"async/lag/mean": sampled.double().mean().item(), "async/lag/max": float(sampled.max())}
    for lag in sampled.unique().tolist():
        of_tokens, of_responses, measured = (lags == lag) & batch.by_policy, oldest == lag, last == lag
        pair = (batch.logprobs[of_tokens][None], batch.rollout_logprobs[of_tokens][None])
        distance = mismatch_metrics(*pair, torch.ones_like(pair[0]), "token", threshold)
        figures = {
            "tokens": of_tokens[batch.by_policy].double().mean().item(),
            "kl": distance["k3_kl"],
            "eff_sample_size": distance["rollout_is_eff_sample_size"],
            "capped": distance["rollout_is_ratio_fraction_high"],
        }
        if of_responses.any():
            figures["reward"] = batch.rewards[of_responses].mean().item()
            figures["response_length"] = batch.response_lengths[of_responses].double().mean().item()
        metrics |= with_prefix(f"async/lag_{lag}", figures | version_metrics(batch[measured]))
    return metrics


def version_metrics(batch: Batch) -> dict[str, float]:
    """Compare effective rank, velocity and acceleration before the update with the engine's.

    With ``calculator.compare_versions``: ``<layer>/<metric>/change``, the mean difference, and ``abs_change``, the mean
    distance.
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
    """Scores [B] float32, and whether each response is correct [B] bool."""
    scores = torch.tensor([verdict.score for verdict in verdicts])
    return scores, torch.tensor([verdict.correct for verdict in verdicts])


def count_reasons(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """``verifier/<reason>``: how many verdicts have each reason."""
    counts = Counter(verdict.reason for verdict in verdicts)
    return {f"verifier/{reason}": float(count) for reason, count in counts.items()}


def verdict_figures(score: Tensor, correct: Tensor, results: Iterable[Verdict]) -> dict[str, float]:
    """Return figures of any group of verdicts: ``pass@1``, ``score/mean``, and values of custom functions.

    ``score [B]`` and ``correct [B]`` are those of ``results``, B verdicts.
    """
    shares = {"pass@1": correct.double().mean().item(), "score/mean": score.double().mean().item()}
    return shares | extra_metrics(result.extras for result in results)


def verdict_metrics(
    verdicts: Sequence[Verdict], n: int, sources: Sequence[str], logged: Sequence[str]
) -> dict[str, float]:
    """Return all figures of the verdicts on sampled responses.

    These are scores, the count of each reason, the share of prompts whose ``n`` > 1 responses all score alike and so
    teach nothing, values that custom functions returned, and figures by data source (``logged`` of the responses'
    ``sources``).
    """
    scores, correct = score_tensors(verdicts)

    def describe(rows: Tensor) -> dict[str, float]:
        chosen = [verdicts[i] for i in rows.nonzero().flatten().tolist()]
        return verdict_figures(scores[rows], correct[rows], chosen)

    figures = verdict_figures(scores, correct, verdicts)
    metrics = {"score/mean": figures.pop("score/mean")} | count_reasons(verdicts) | with_prefix("train", figures)
    if n > 1:
        metrics["train/groups_without_variance"] = (~groups_that_differ(scores, n)).double().mean().item()
    return metrics | with_prefix("train", metrics_by_source(sources, logged, describe))


def groups_that_differ(values: Tensor, n: int) -> Tensor:
    """[B / n] bool, whether the n ``values`` of each group differ, for ``values [B]``."""
    grouped = values.view(-1, n)
    return (grouped != grouped[:, :1]).any(dim=1)


def sample_figures(score: Tensor, correct: Tensor, results: Sequence[Verdict], n: int) -> dict[str, float]:
    """Means over prompts of figures of k responses, for k = 2, 4, 8, ... and ``n``; nothing for ``n`` = 1.

    ``pass@k``, the chance that one of them is correct; ``best@k/mean`` and ``worst@k/mean``, their highest and lowest
    score; ``maj@k/mean``, the chance that a vote elects the correct answer, left out where verifiers name no answers.
    Each is the exact mean over all choices of k of the n responses.

    ``score [B]`` and ``correct [B]`` are those of ``results``, B verdicts.
    """
    grouped_score, num_correct = score.view(-1, n), correct.view(-1, n).sum(dim=1)
    right, answers = correct.tolist(), [vote_key(result.answer) for result in results]
    votes = [answer_classes(right[i : i + n], answers[i : i + n]) for i in range(0, len(answers), n)]
    num_samples = num_correct.new_full(num_correct.shape, n)
    figures = {}
    for k in k_grid(n)[1:]:
        figures[f"pass@{k}"] = pass_at_k(num_samples, num_correct, k).mean().item()
        figures[f"best@{k}/mean"] = best_at_k(grouped_score, k).mean().item()
        figures[f"worst@{k}/mean"] = -best_at_k(-grouped_score, k).mean().item()
        if any(result.answer for result in results):
            figures[f"maj@{k}/mean"] = fmean(majority_at_k(*vote, k) for vote in votes)
    return figures


# --- Data sources ---


def data_sources(batch: Batch) -> list[str]:
    """Return the data source of each response, B."""
    return [record.data_source for record in batch.records]


def logged_sources(sources: Iterable[str]) -> list[str]:
    """Of the ``sources`` of all prompts, those with figures of their own: the ``MAX_SOURCES`` that most prompts have.

    None of a single source, because they would be the figures of all responses.
    """
    counts = Counter(sources)
    return [source for source, _ in counts.most_common(MAX_SOURCES)] if len(counts) > 1 else []


def metrics_by_source(
    sources: Sequence[str], logged: Sequence[str], describe: Callable[[Tensor], Mapping[str, float]]
) -> dict[str, float]:
    """Metrics of each source of ``logged`` that is there, ``<source>/<name>``, without the largest and smallest values.

    Args:
        sources: the data source of each response, B.
        describe: metrics of the responses chosen by rows [B] bool.
    """
    metrics: dict[str, float] = {}
    for source in logged:
        rows = torch.tensor([name == source for name in sources])
        if rows.any():
            means = {name: v for name, v in describe(rows).items() if not name.endswith(("/max", "/min"))}
            metrics |= with_prefix(source, means)
    return metrics


def with_prefix(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """``{name: value}`` -> ``{prefix/name: value}``."""
    return {f"{prefix}/{name}": value for name, value in metrics.items()}


def _spread(prefix: str, values: Tensor) -> dict[str, float]:
    """``prefix/{mean,max,min}`` of ``values``; nothing for none."""
    if not values.numel():
        return {}
    values = values.double()
    return {
        f"{prefix}/mean": values.mean().item(),
        f"{prefix}/max": values.max().item(),
        f"{prefix}/min": values.min().item(),
    }
