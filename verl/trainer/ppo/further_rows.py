"""Adds the additional message histories of agent sessions to a training batch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from verl.batch import EPISODE, POLICY, Batch
from verl.batch.flat import sums_within
from verl.rollout.partial import PER_TOKEN


def with_further_rows(batch: Batch, score: Callable[[Batch], Batch]) -> Batch:
    """Return the batch with each agent session's additional histories inserted as rows after the session.

    All tokens of an episode have the same advantage, which is divided by its number of histories. Because losses are
    proportional to advantages, the weight of an episode does not depend on this number. ``episode`` [B'] is the index
    of each row's session. If there are no additional histories, only the column ``further_rows`` is removed.

    Args:
        batch: Columns for the update, including ``further_rows``, with B rows.
        score: Function that computes the remaining columns of the further rows from ``tokens``, ``source`` and
            ``rollout_logprobs``. Its ``learn_mask`` excludes tokens that rollout correction rejects.
    """
    saved, batch = batch.further_rows, batch.without("further_rows")
    counts = torch.tensor([len(others) for others in saved])
    if not counts.any():
        return batch
    # 1. Create a row for each history, with its session's columns.
    owner = torch.arange(len(batch)).repeat_interleave(counts)
    rows: list[dict[str, Any]] = [row for others in saved for row in others]
    further = Batch.of([row["prompt_ids"] for row in rows], [row["tokens"] for row in rows]).widened(batch.width)
    for name in ("source", "rollout_logprobs"):
        values = [value for row in rows for value in row[name]]
        further.fill(**{name: torch.tensor(values, dtype=PER_TOKEN[name])})
    for name in batch.names:
        if batch.kind_of(name) == EPISODE:
            column = getattr(batch, name)
            picked = column[owner] if isinstance(column, Tensor) else [column[i] for i in owner.tolist()]
            further.fill(EPISODE, **{name: picked})
    # 2. Give every row its share of the advantage.
    by_policy = batch.source == POLICY
    sums = sums_within(torch.where(by_policy, batch.advantages.double(), 0.0), batch.response_lengths)
    of_episode = sums / batch.policy_lengths / (counts + 1)
    learned = batch.learned_responses
    batch.fill(advantages=(batch.advantages.double() / (counts + 1).repeat_interleave(batch.response_lengths)).float())
    per_token = of_episode[owner].repeat_interleave(further.response_lengths)
    further.fill(advantages=torch.where(further.source == POLICY, per_token, 0.0).float())
    scored = score(further)
    mask = (further.source == POLICY) & learned[owner].repeat_interleave(further.response_lengths)
    further.merge(scored).fill(learn_mask=mask & scored.learn_mask)
    # 3. Put the rows of an episode next to each other.
    missing = [name for name in batch.names if name not in further]
    assert not missing, f"the update needs {missing} of further rows"
    joined = Batch.join([batch, further.columns(*batch.names)])
    episode = torch.cat([torch.arange(len(batch)), owner])
    joined.fill(EPISODE, episode=episode)
    return joined[episode.argsort(stable=True)]
