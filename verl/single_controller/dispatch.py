"""Calls of a worker group on batches of any length, with tokens balanced over workers and results in the batch's order.

Legend: B rows, S columns.
"""

from typing import Any

import torch

from verl.single_controller.balance import balanced_order
from verl.single_controller.worker_group import WorkerGroup, concat


def run_rows(workers: WorkerGroup, method: str, batch: Any, *arguments: Any, copies: int = 1, balance: bool) -> Any:
    """Call ``method`` on shares of ``batch`` and join the results, rows in the batch's order.

    Workers gather parameters together and must do equally many forward passes, so shares are filled up to one size
    with rows that the batch has already; what they give is dropped.

    Args:
        batch: a tensorclass with ``attention_mask`` [B, S].
        copies: neighbouring workers that work on one share together, see ``WorkerGroup.run_split``.
        balance: give every worker about as many tokens, not only as many rows.

    Returns:
        What the workers return, tensors or tuples of them whose first dimension is that of their share, [B, ...].
    """
    size, num_shares = len(batch), workers.world_size // copies
    order = torch.arange(size + -size % num_shares) % size
    if balance:
        order = order[balanced_order(batch.attention_mask.sum(dim=1)[order], num_shares)]
    joined = concat(workers.run_split(method, batch[order], *arguments, copies=copies))
    position = torch.empty(size, dtype=torch.int64)
    position[order] = torch.arange(len(order))
    return tuple(part[position] for part in joined) if isinstance(joined, tuple) else joined[position]


def run_update(
    workers: WorkerGroup, method: str, batch: Any, *arguments: Any, copies: int = 1, balance: bool
) -> dict[str, float]:
    """Call ``method`` on shares of ``batch``, whose rows may go to any worker; returns what the first worker returns.

    Arguments as :func:`run_rows`; all workers report the same. The rows must be a multiple of the shares.
    """
    num_shares = workers.world_size // copies
    assert len(batch) % num_shares == 0, f"{method}: {len(batch)} rows cannot be split over {num_shares} workers evenly"
    if balance:
        batch = batch[balanced_order(batch.attention_mask.sum(dim=1), num_shares)]
    metrics: dict[str, float] = workers.run_split(method, batch, *arguments, copies=copies)[0]
    return metrics
