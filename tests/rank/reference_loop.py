"""Velocity and acceleration by ``calculator.prefix_rule``, prefix by prefix in float64: what the tests compare with."""

import math

import numpy as np
import torch


def mask_of(lengths, padded_rows):
    return (torch.arange(padded_rows) < torch.tensor(lengths)[:, None]).long()


def effective_rank(rows):
    s = np.linalg.svd(rows - rows.mean(axis=0), compute_uv=False)
    if len(rows) < 2 or s[0] == 0:
        return 1.0
    p = s[s > 1e-12 * s[0]] / s.sum()
    return math.exp(-(p * np.log(p)).sum())


def terms(rule, rows, stride, most, end, stored=lambda value: value):
    """The values m_1, m_2, ... of one response, prefix by prefix in float64; the whole one's as it is ``stored``."""
    kept = rows if most is None else rows[:most] if end == "start" else rows[-most:]
    values, reached = [], 0
    if rule == "at_stride_and_whole":
        for reached in range(stride, len(kept) + 1, stride):
            values.append(effective_rank(kept[:reached]))
        if values and reached < max(1, len(kept) - 1):
            values.append(stored(effective_rank(rows)))
        return values
    if rule == "after_stride_and_whole" and len(kept) < 2 * stride:
        return []
    for step in range(stride, len(kept), stride):
        values.append(effective_rank(kept[: step + 1]))
    if rule == "after_stride_and_whole" and values and len(kept) == len(rows) > 1:
        values.append(stored(effective_rank(rows)))
    return values


def velocity_and_acceleration(values):
    deltas, steps = [], []
    for j in range(1, len(values)):
        deltas.append(values[j] - sum(values[:j]) / j)
        if len(deltas) > 1:
            steps.append(deltas[-1] - deltas[-2])
    return [sum(d) / len(d) if d else 0.0 for d in (deltas, steps)]
