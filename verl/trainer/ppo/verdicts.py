"""What the verdicts of verifiers say: tensors, metrics, and how the prompts of a step went.

Legend: B responses, G prompts.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from verl.batch import Batch
from verl.method import StepOutcome
from verl.rewards import Score
from verl.rewards.extras import extra_metrics
from verl.trainer.logging.rollout_metrics import group_metrics, with_prefix
from verl.trainer.logging.source_metrics import metrics_by_source, verdict_figures

FIRST = ("first_records", "first_verdicts")
"""Columns with the prompts as the data set has them and the verdicts on the responses to these, where
``Method.judged`` may replace them."""


def score_tensors(verdicts: Sequence[Score]) -> tuple[Tensor, Tensor]:
    """Scores [B] float32, and whether each response is correct [B] bool."""
    scores = torch.tensor([verdict["score"] for verdict in verdicts])
    return scores, torch.tensor([verdict["correctness"] for verdict in verdicts])


def count_reasons(verdicts: Sequence[Score]) -> dict[str, float]:
    """``verifier/<reason>``: how many verdicts have each reason."""
    counts = Counter(verdict["reason"] for verdict in verdicts)
    return {f"verifier/{reason}": float(count) for reason, count in counts.items()}


def first(batch: Batch, name: str) -> list[Any]:
    """The column ``records`` or ``verdicts`` as it was before ``Method.judged`` replaced any, B."""
    column: list[Any] = getattr(batch, f"first_{name}" if f"first_{name}" in batch else name)
    return column


def data_sources(batch: Batch) -> list[str]:
    """The data source of each response, B."""
    return [record.data_source for record in batch.records]


def verdict_metrics(
    verdicts: Sequence[Score], group: Tensor, sources: Sequence[str], logged: Sequence[str]
) -> dict[str, float]:
    """Everything that the verdicts on responses say, in the groups ``group [B]``: scores, the count of each reason,
    what custom functions returned, and the same by data source (``logged`` of the responses' ``sources``)."""
    scores, correct = score_tensors(verdicts)

    def describe(rows: Tensor) -> dict[str, float]:
        chosen = [verdicts[i] for i in rows.nonzero().flatten().tolist()]
        return verdict_figures(scores[rows], correct[rows], chosen)

    metrics = group_metrics(scores, correct, group) | count_reasons(verdicts)
    metrics |= with_prefix("train", extra_metrics(verdict["reward_extra_info"] for verdict in verdicts))
    return metrics | with_prefix("train", metrics_by_source(sources, logged, describe))


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


def step_outcome(step: int, batch: Batch, n: int, metrics: Mapping[str, float]) -> StepOutcome:
    """How the prompts of a step went, each with ``n`` responses."""
    records, verdicts = first(batch, "records")[::n], first(batch, "verdicts")
    means, accuracy = (
        values.double().view(len(records), -1).mean(dim=1).tolist() for values in score_tensors(verdicts)
    )
    return StepOutcome(step, [record.uid for record in records], means, accuracy, dict(metrics), tuple(records))


def groups_that_differ(values: Tensor, n: int) -> Tensor:
    """Whether the ``n`` values of a group differ, [G] bool, for ``values [G n]``."""
    grouped = values.view(-1, n)
    return (grouped != grouped[:, :1]).any(dim=1)
