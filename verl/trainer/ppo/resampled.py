"""Groups that ``Method.resample`` has sampled again with another prompt."""

from collections.abc import Sequence
from typing import Any

import torch

from verl.batch import Batch
from verl.trainer.logging.rollout_metrics import score_tensors

FIRST = ("first_records", "first_verdicts")
"""Columns with the prompts as in the data set and the verdicts on the responses to these, where ``Method.resample`` may
replace them."""


def replace_groups(batch: Batch, places: Sequence[int], again: Batch, n: int) -> Batch:
    """Return ``batch`` with the groups of n responses at ``places``, ascending, from ``again``."""
    num = len(batch) // n
    order = torch.arange(num)
    order[torch.tensor(places)] = num + torch.arange(len(places))
    return Batch.join([batch, again])[(order[:, None] * n + torch.arange(n)).flatten()]


def first(batch: Batch, name: str) -> list[Any]:
    """Return the column ``records`` or ``verdicts`` as it was before ``Method.resample`` replaced any, B."""
    column: list[Any] = getattr(batch, f"first_{name}" if f"first_{name}" in batch else name)
    return column


def edited_metrics(batch: Batch, n: int) -> dict[str, float]:
    """Count the prompts that ``Method.resample`` edited, and compare their accuracy before and after."""
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
