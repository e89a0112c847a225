"""Samples tokens by inverse transform sampling, with one uniform random number per token.

Legend: B tokens, V = vocabulary size. The number of operations is independent of B, and none waits for the device.
"""

import torch
from torch import Tensor

BLOCK = 512
"""Number of consecutive tokens whose weights are summed in float32, with errors below 1e-6. Other sums use float64."""


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draw tokens [B] int64, each with probability ``weights / weights.sum()``.

    The function first draws a block of tokens and then a token in the block. A cumulative sum over the whole vocabulary
    would be inaccurate in float32 (on a GPU, not even monotonic). In float64, it would need several times the memory of
    the distribution. Tokens with weight 0 are never drawn. For rows with NaN, an arbitrary token is returned.

    Args:
        weights: Unnormalized probabilities, [B, V] float32, at least 0.
        uniforms: Uniform numbers in [0, 1), [B] float64.
    """
    vocab_size = weights.shape[1]
    num_whole, left = divmod(vocab_size, BLOCK)
    # 1. Draw a block from the block sums.
    sums = weights[:, : num_whole * BLOCK].unflatten(1, (num_whole, BLOCK)).sum(dim=-1)
    if left:
        sums = torch.cat([sums, weights[:, -left:].sum(dim=-1, keepdim=True)], dim=1)
    block, rest = _invert(sums.double(), uniforms)
    # 2. Draw a token within the block with the remainder of the uniform number. The last block may be shorter.
    tokens = block[:, None] * BLOCK + torch.arange(BLOCK, device=weights.device)
    inside = weights.gather(1, tokens.clamp(max=vocab_size - 1)).double().masked_fill(tokens >= vocab_size, 0.0)
    place, _ = _invert(inside, rest)
    return block * BLOCK + place


def _invert(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Find the entry at which each row's cumulative sum [B, N] exceeds ``uniforms`` times the row's total.

    The entry has a positive weight. Return its index, and the remainder as a uniform number in [0, 1].
    """
    cumulative = weights.cumsum(dim=-1)
    # Due to rounding, the sum may differ from the total at the last positive weight, and change at a weight of 0.
    targets = (uniforms * (1 - 2.0**-40))[:, None] * cumulative[:, -1:]
    passed = (cumulative > targets) & (weights > 0)
    index = passed.to(torch.uint8).argmax(dim=-1, keepdim=True)  # first match
    weight = weights.gather(1, index)
    rest = (targets - cumulative.gather(1, index) + weight) / weight
    return index.squeeze(1), rest.clamp(0.0, 1.0).squeeze(1)
