"""Shuffles signals within each group, as a control experiment for methods that use hidden states."""

from collections.abc import Collection

import numpy as np
import torch

from verl.batch import RANK, Batch


def shuffle_within_groups(batch: Batch, seed: int, step: int, except_for: Collection[str] = ()) -> None:
    """Permute ``rank/`` columns [B, L] and ``mean_states`` [B, L, D] within groups, in place.

    All columns are permuted in the same way. The permutation is determined by the run's seed, the step, and the
    positions of each group's responses in the batch. On average, one response per group keeps its values.

    Args:
        batch: Batch with ``group`` [B].
        except_for: Names of columns to leave unchanged.
    """
    shuffled = torch.from_numpy(np.random.default_rng([seed, step]).permutation(len(batch)))
    rows = torch.empty_like(shuffled)
    # Both sides are sorted by group, so every row receives the values of a row in its own group.
    rows[batch.group.argsort(stable=True)] = shuffled[batch.group[shuffled].argsort(stable=True)]
    names = [name for name in batch.names if name.startswith(RANK) or name == "mean_states"]
    batch.fill(**{name: getattr(batch, name)[rows] for name in names if name not in except_for})
