"""Inputs of a user's policy loss, from lists."""

from typing import Any

import torch

from verl.algorithms.losses import BatchSize, LossInputs


def loss_inputs(logprobs: list[list[float]], mask: list[list[int]], **given: Any) -> LossInputs:
    """A micro-batch that is the whole mini-batch; ``old_logprobs`` and ``advantages`` are 0 unless given."""
    values, learned = torch.tensor(logprobs, requires_grad=True), torch.tensor(mask).bool()
    zeros = torch.zeros(values.shape)
    size = BatchSize(int(learned.sum()), int(learned.any(dim=1).sum()), values.shape[1])
    fields: dict[str, Any] = {"old_logprobs": zeros, "advantages": zeros, "response_mask": learned}
    fields |= {"sampled_mask": learned, "tokens": zeros.long(), "entropy": zeros, "size": size}
    return LossInputs(values, **(fields | given))
