"""The control of methods that read hidden states: the same signals, given to other responses to the same prompt."""

from collections.abc import Collection

import numpy as np
import torch

from verl.batch import RANK, Batch


def shuffle_within_groups(batch: Batch, seed: int, step: int, except_for: Collection[str] = ()) -> None:
    """Permute ``rank/`` columns [B, L] and ``mean_states`` [B, L, D] within groups, in place.

    All columns get one permutation, which follows from the run's seed, the step, and the places of each group's rows in
    the batch. It leaves one of n rows of a group in its place on average.

    Args:
        batch: Batch with ``group`` [B].
        except_for: Names of columns to leave as they are.
    """
    shuffled = torch.from_numpy(np.random.default_rng([seed, step]).permutation(len(batch)))
    rows = torch.empty_like(shuffled)
    # Both sides list rows by group, so that a row of a group gets one of the same group.
    rows[batch.group.argsort(stable=True)] = shuffled[batch.group[shuffled].argsort(stable=True)]
    names = [name for name in batch.names if name.startswith(RANK) or name == "mean_states"]
    batch.fill(**{name: getattr(batch, name)[rows] for name in names if name not in except_for})
