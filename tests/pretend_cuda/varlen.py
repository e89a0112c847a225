"""What torch's variable-length attention computes on a GPU, by plain products on a CPU, with the checks of its kernel.

Legend: T tokens of all rows, H query heads, K key heads, D head width.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Sizes(NamedTuple):
    """The arguments of the kernel behind the states."""

    starts_q: Tensor
    starts_k: Tensor
    longest_q: int
    longest_k: int
    is_causal: bool = False
    scale: float | None = None
    window: list[int] | None = None


def check(query: Tensor, key: Tensor, value: Tensor, sizes: Sizes) -> None:
    """Raise ``RuntimeError`` for what the kernel would refuse, or read beyond its rows for."""
    width = query.shape[-1]
    bounds = [(sizes.starts_q, len(query), sizes.longest_q), (sizes.starts_k, len(key), sizes.longest_k)]
    wrong = {
        "half precision only": query.dtype not in (torch.float16, torch.bfloat16),
        "head widths up to 256, multiples of 8, all alike": (
            width > 256 or width % 8 or {key.shape[-1], value.shape[-1]} != {width}
        ),
        "offsets must be int32": any(starts.dtype != torch.int32 for starts, _, _ in bounds),
        "the last dimension must be contiguous": any(states.stride(-1) != 1 for states in (query, key, value)),
        "offsets must start at 0 and end at the last row": any(
            starts[0] != 0 or starts[-1] != count for starts, count, _ in bounds
        ),
        "a row is longer than max_q or max_k": any(
            len(starts) > 1 and starts.diff().max() > longest for starts, _, longest in bounds
        ),
    }
    for what, is_wrong in wrong.items():
        if is_wrong:
            raise RuntimeError(f"varlen_attn: {what}")


def _rows(query: Tensor, key: Tensor, sizes: Sizes) -> list[tuple[slice, slice, Tensor, float]]:
    """For each row its queries, its keys, the mask [Q, N] of what is seen, and the scale of scores."""
    scale = query.shape[-1] ** -0.5 if sizes.scale is None else sizes.scale
    left, right = sizes.window or (-1, -1)
    right = 0 if sizes.is_causal else right
    starts_q, starts_k = sizes.starts_q.tolist(), sizes.starts_k.tolist()
    rows = []
    for row in range(len(starts_q) - 1):
        queries, keys = slice(*starts_q[row : row + 2]), slice(*starts_k[row : row + 2])
        count, longest = queries.stop - queries.start, keys.stop - keys.start
        # The last query is aligned with the last key.
        ahead = torch.arange(longest)[None] - (torch.arange(count)[:, None] + longest - count)
        seen = torch.ones(count, longest, dtype=torch.bool)
        seen &= (ahead <= right) if right >= 0 else True
        seen &= (ahead >= -left) if left >= 0 else True
        rows.append((queries, keys, seen, scale))
    return rows


def _weights(query: Tensor, key: Tensor, seen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Softmax over the keys [H, Q, N], and the logarithm of its denominator [H, Q]; float32."""
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    scores = scores.masked_fill(~seen, float("-inf"))
    return scores.softmax(-1).nan_to_num(0.0), scores.logsumexp(-1)


def forward(query: Tensor, key: Tensor, value: Tensor, *sizes: Any) -> tuple[Tensor, Tensor, Tensor]:
    """[T, H, D], the log-denominators [H, T], and the state of a generator that nothing reads."""
    given = Sizes(*sizes[:7])
    check(query, key, value, given)
    outputs, denominators = [], []
    groups = query.shape[1] // key.shape[1]
    for queries, keys, seen, scale in _rows(query, key, given):
        k, v = (states[keys].float().repeat_interleave(groups, 1) for states in (key, value))
        weights, denominator = _weights(query[queries].float(), k, seen, scale)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v))
        denominators.append(denominator)
    return torch.cat(outputs).to(query.dtype), torch.cat(denominators, 1), torch.zeros(2, dtype=torch.uint64)


def backward(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Gradients of query, key and value.

    ``rest``: output, log-denominators, offsets of queries and keys, the longest of each, whether causal, the
    generator's state, scale and window, as the kernel has them.
    """
    output, _, starts_q, starts_k, longest_q, longest_k, is_causal, _, scale, window = (*rest, None, None)[:10]
    if gradient.stride(-1) != 1:
        raise RuntimeError("varlen_attn: the last dimension of the gradient must be contiguous")
    groups, heads = query.shape[1] // key.shape[1], key.shape[1]
    found = [torch.zeros_like(states, dtype=torch.float32) for states in (query, key, value)]
    sizes = Sizes(starts_q, starts_k, longest_q, longest_k, is_causal, scale, window)
    for queries, keys, seen, factor in _rows(query, key, sizes):
        q, g, o = query[queries].float(), gradient[queries].float(), output[queries].float()
        k, v = (states[keys].float().repeat_interleave(groups, 1) for states in (key, value))
        # With P the weights and dP = g v^T: dS = P (dP - sum over keys of P dP), where that sum is g . output.
        weights, _ = _weights(q, k, seen, factor)
        scores = weights * (torch.einsum("qhd,khd->hqk", g, v) - (g * o).sum(-1).T[:, :, None]) * factor
        found[0][queries] += torch.einsum("hqk,khd->qhd", scores, k)
        of_keys = torch.einsum("hqk,qhd->khd", scores, q), torch.einsum("hqk,qhd->khd", weights, g)
        for total, part in zip(found[1:], of_keys, strict=True):
            total[keys] += part.unflatten(1, (heads, groups)).sum(2)
    return tuple(states.to(query.dtype) for states in found)
