"""Figures of single data sources, in training and in validation.

Legend: B responses.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from verl.batch import Batch
from verl.rewards import Score
from verl.rewards.extras import extra_metrics
from verl.trainer.logging.rollout_metrics import length_metrics, rank_scalars, response_metrics, with_prefix

MAX_SOURCES = 16
"""Data sources with figures of their own. Each has about a hundred."""


def logged_sources(sources: Iterable[str]) -> list[str]:
    """Of the ``sources`` of all prompts, those with figures of their own: the ``MAX_SOURCES`` that most prompts have.

    None of a single source, because they would be the figures of all responses.
    """
    counts = Counter(sources)
    return [source for source, _ in counts.most_common(MAX_SOURCES)] if len(counts) > 1 else []


def metrics_by_source(
    sources: Sequence[str], logged: Sequence[str], describe: Callable[[Tensor], dict[str, float]]
) -> dict[str, float]:
    """``<source>/<name>`` of each of the ``logged`` sources that has responses here.

    Args:
        sources: of each response, B.
        logged: see :func:`logged_sources`.
        describe: metrics of the responses chosen by rows [B] bool.
    """
    metrics: dict[str, float] = {}
    for source in logged:
        rows = torch.tensor([name == source for name in sources])
        if rows.any():
            metrics |= with_prefix(source, describe(rows))
    return metrics


def verdict_figures(score: Tensor, correct: Tensor, results: Iterable[Score]) -> dict[str, float]:
    """What verdicts say of any group of responses: ``pass@1``, ``score/mean``, and what custom functions returned.

    ``score [B]`` and ``correct [B]`` are those of ``results``, B verdicts.
    """
    shares = {"pass@1": correct.double().mean().item(), "score/mean": score.double().mean().item()}
    return shares | extra_metrics(result["reward_extra_info"] for result in results)


def response_figures(batch: Batch, max_prompt_length: int) -> dict[str, float]:
    """Metrics of any group of responses besides the verdicts: lengths and rank metrics, by correctness too."""
    lengths = length_metrics(batch, max_prompt_length) | response_metrics(batch)
    return lengths | rank_scalars(batch.rank_metrics, batch.correct)
