"""Adds the additional message histories of agent sessions to a training batch."""

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from verl.batch import EPISODE, POLICY, Batch
from verl.batch.flat import sums_within
from verl.rollout.partial import PER_TOKEN


def with_further_rows(batch: Batch, score: Callable[[Batch], Batch]) -> Batch:
    """Return the batch with each agent session's additional histories inserted as rows after the session.

    All tokens of an episode have the same advantage, and each of its k rows has the weight 1/k. A token that several
    histories share is learned from once, in the row that sampled it, with the sum of their weights
    (:func:`num_histories`). Losses are proportional to advantages, which are multiplied by the weights. ``episode``
    [B'] is the index of each row's session. If there are no additional histories, only the column ``further_rows`` is
    removed.

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
    # 2. Give the further rows the mean advantage of their session.
    by_policy = batch.source == POLICY
    sums = sums_within(torch.where(by_policy, batch.advantages.double(), 0.0), batch.response_lengths)
    learned = batch.learned_responses
    per_token = (sums / batch.policy_lengths)[owner].repeat_interleave(further.response_lengths)
    further.fill(advantages=torch.where(further.source == POLICY, per_token, 0.0).float())
    scored = score(further)
    mask = (further.source == POLICY) & learned[owner].repeat_interleave(further.response_lengths)
    further.merge(scored).fill(learn_mask=mask & scored.learn_mask)
    # 3. Put the rows of an episode next to each other.
    missing = [name for name in batch.names if name not in further]
    assert not missing, f"the update needs {missing} of further rows"
    joined = Batch.join([batch, further.columns(*batch.names)])
    episode = torch.cat([torch.arange(len(batch)), owner])
    joined = joined.fill(EPISODE, episode=episode)[episode.argsort(stable=True)]
    # 4. Give every token the share of its episode's rows whose histories have it.
    prompts = joined.tokens[~joined.in_response].split(joined.prompt_lengths.tolist())
    responses = joined.response_tokens.split(joined.response_lengths.tolist())
    rows_left, sharing = zip(prompts, responses, strict=True), list[Tensor]()
    for size in (counts + 1).tolist():
        sharing += num_histories(list(islice(rows_left, size)))
    num_rows = (counts + 1)[joined.episode].repeat_interleave(joined.response_lengths)
    return joined.fill(advantages=(joined.advantages.double() * torch.cat(sharing) / num_rows).float())


def num_histories(rows: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Return how many rows of an episode have each response token in their history, including the token's own row.

    Another row has the token if its prompt begins with everything up to the token. What it samples itself is its own.

    Args:
        rows: Prompt [P] and response [T] of each row.

    Returns:
        Counts [T] for each row.
    """
    found = []
    for prompt, response in rows:
        whole, counts = torch.cat([prompt, response]), torch.ones_like(response)
        for other, _ in rows:
            size = min(len(whole), len(other))
            common = int((whole[:size] == other[:size]).cumprod(0).sum())
            counts[: max(0, common - len(prompt))] += 1
        found.append(counts)
    return found
