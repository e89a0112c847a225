"""Assigning rows to workers so that all get about as many tokens.

Legend: B rows.
"""

import heapq

import torch
from torch import Tensor


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
