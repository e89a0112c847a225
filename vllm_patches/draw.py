"""Draws tokens by inverting the cumulative distribution: one uniform number decides each token.

Legend: B rows, V vocabulary. The number of operations does not depend on B, and nothing waits for the device.
"""

import torch
from torch import Tensor

BLOCK = 512
"""Neighbouring tokens whose weights are summed in float32, within 1e-6 of the exact sum; everything else is float64."""


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draw tokens [B] int64, each with probability ``weights / weights.sum()``.

    A cumulative sum of a whole vocabulary in float32 is neither accurate nor, on a GPU, monotone; in float64 it takes
    several times the memory of the distribution. So first a block is drawn, then a token in it. A token of weight 0 is
    never drawn. Where a row holds NaN, some token is.

    Args:
        weights: [B, V] float32, at least 0, in any scale.
        uniforms: [B] float64 in [0, 1).
    """
    vocab_size = weights.shape[1]
    num_whole, left = divmod(vocab_size, BLOCK)
    # 1. The weights of blocks.
    sums = weights[:, : num_whole * BLOCK].unflatten(1, (num_whole, BLOCK)).sum(dim=-1)
    if left:
        sums = torch.cat([sums, weights[:, -left:].sum(dim=-1, keepdim=True)], dim=1)
    block, rest = _invert(sums.double(), uniforms)
    # 2. In the block, what is left of the number decides. The last block may be shorter.
    tokens = block[:, None] * BLOCK + torch.arange(BLOCK, device=weights.device)
    inside = weights.gather(1, tokens.clamp(max=vocab_size - 1)).double().masked_fill(tokens >= vocab_size, 0.0)
    place, _ = _invert(inside, rest)
    return block * BLOCK + place


def _invert(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Find where the cumulative sum of each row [B, N] passes ``uniforms`` times the total, and how far into it.

    Both are [B]: the index of a positive weight, and a number in [0, 1] that is uniform if ``uniforms`` is.
    """
    cumulative = weights.cumsum(dim=-1)
    # Rounding may let the sum differ at the last positive weight from the total, and at a weight of 0 from before.
    targets = (uniforms * (1 - 2.0**-40))[:, None] * cumulative[:, -1:]
    passed = (cumulative > targets) & (weights > 0)
    index = passed.to(torch.uint8).argmax(dim=-1, keepdim=True)  # The first.
    weight = weights.gather(1, index)
    rest = (targets - cumulative.gather(1, index) + weight) / weight
    return index.squeeze(1), rest.clamp(0.0, 1.0).squeeze(1)
