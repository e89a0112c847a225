"""Handling of groups that ``Method.resample`` samples again with edited prompts."""

from collections.abc import Sequence
from typing import Any

import torch

from verl.batch import Batch
from verl.trainer.logging.rollout_metrics import score_tensors

FIRST = ("first_records", "first_verdicts")
"""Columns with the prompts and verdicts from before resampling, present if the method overrides ``resample``."""


def replace_groups(batch: Batch, groups: Sequence[int], resampled: Batch, n: int) -> Batch:
    """Replace the groups of ``batch`` at the indices ``groups``, in ascending order, with the ``resampled`` groups."""
    num = len(batch) // n
    order = torch.arange(num)
    order[torch.tensor(groups)] = num + torch.arange(len(groups))
    return Batch.join([batch, resampled])[(order[:, None] * n + torch.arange(n)).flatten()]


def original(batch: Batch, name: str) -> list[Any]:
    """Return the B entries of the column ``records`` or ``verdicts`` from before resampling."""
    column: list[Any] = getattr(batch, f"first_{name}" if f"first_{name}" in batch else name)
    return column


def edited_metrics(batch: Batch, n: int) -> dict[str, float]:
    """Return the number of edited prompts, the number of added tokens, and the accuracy before and after the edits."""
    pairs = list(zip(batch.records, batch.first_records, strict=True))[::n]
    added = [len(now.input_ids) - len(before.input_ids) for now, before in pairs if now is not before]
    metrics = {"resample/groups": float(len(added))}
    if added:
        edited = torch.tensor([now is not before for now, before in pairs])
        for name, verdicts in (("before", batch.first_verdicts), ("after", batch.verdicts)):
            _, correct = score_tensors(verdicts)
            metrics[f"resample/pass@1/{name}"] = correct.view(len(edited), -1)[edited].double().mean().item()
        metrics["resample/prompt_tokens_added/mean"] = sum(added) / len(added)
    return metrics
