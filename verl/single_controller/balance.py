"""Assigning rows to workers so that all get about as many tokens.

Legend: B rows.
"""

import heapq
from typing import NamedTuple

import torch
from torch import Tensor

from verl.models.micro_batches import rows_by_value


def balanced_order(lengths: Tensor, num_shares: int) -> Tensor:
    """An order of the rows whose contiguous shares, as ``WorkerGroup.run_split`` cuts them, have about equal tokens.

    The longest rows are dealt out first, each to the share with the fewest tokens that still has room (longest
    processing time first). Within a share rows go from long to short.

    Args:
        lengths: [B] integers, tokens of each row.
        num_shares: shares, which differ by at most one row.

    Returns:
        [B] int64, a permutation of the rows.
    """
    size = len(lengths)
    bounds = [size * share // num_shares for share in range(num_shares + 1)]
    members: list[list[int]] = [[] for _ in range(num_shares)]
    open_shares = [(0, share) for share in range(num_shares) if bounds[share] < bounds[share + 1]]
    tokens = lengths.tolist()
    for row in sorted(range(size), key=lambda row: -tokens[row]):
        total, share = heapq.heappop(open_shares)
        members[share].append(row)
        if len(members[share]) < bounds[share + 1] - bounds[share]:
            heapq.heappush(open_shares, (total + tokens[row], share))
    return torch.tensor([row for rows in members for row in rows], dtype=torch.int64)


class Units(NamedTuple):
    """Rows that stay together, in the order in which they are cut into contiguous shares."""

    rows: Tensor
    """[B'] int64, each row of a batch once and then copies that make units and shares equal."""
    copied: Tensor
    """[B'] bool, whether it is such a copy."""
    unit: Tensor
    """[B'] int64, the unit of each: 0, 0, ..., 1, 1, ..."""


def deal_groups(group_ids: Tensor, lengths: Tensor, num_shares: int, balance: bool) -> Units:
    """Whole groups dealt to shares, as many to each, all of one size; what is missing are copies of the shortest rows.

    Args:
        group_ids: [B] integers, equal on rows that stay together.
        lengths: [B] integers, tokens of each row.
        balance: give every share about as many tokens.
    """
    groups = rows_by_value(group_ids)
    tokens = lengths.tolist()
    size = max(map(len, groups))
    shortest = [min(group, key=lambda row: tokens[row]) for group in groups]
    rows = [[*group, *[short] * (size - len(group))] for group, short in zip(groups, shortest, strict=True)]
    copied = [[False] * len(group) + [True] * (size - len(group)) for group in groups]
    for _ in range(-len(groups) % num_shares):
        # A share needs as many groups as the others; one row, the shortest of all, stands for each of this one's.
        rows.append([min(shortest, key=lambda row: tokens[row])] * size)
        copied.append([True] * size)
    totals = torch.tensor([sum(tokens[row] for row in group) for group in rows])
    order = balanced_order(totals, num_shares) if balance else torch.arange(len(rows))
    unit = torch.arange(len(rows)).repeat_interleave(size)
    return Units(torch.tensor(rows)[order].flatten(), torch.tensor(copied)[order].flatten(), unit)
