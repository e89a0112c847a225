"""Adds the additional message histories of agent sessions to a training batch."""

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from verl.batch import EPISODE, POLICY, Batch
from verl.batch.flat import sums_within
from verl.rollout.partial import PER_TOKEN


def with_further_rows(batch: Batch, score: Callable[[Batch], Batch], mean_of_tokens: bool = False) -> Batch:
    """Return the batch with each agent session's additional histories inserted as rows after the session.

    All tokens of an episode have the same advantage, and each of its k histories has the weight 1/k. A token that
    several histories share is learned from once, in the row that sampled it, with the sum of their weights
    (:func:`token_weights`). Losses are proportional to advantages, which are multiplied by the weights. ``episode``
    [B'] is the index of each row's session. If there are no additional histories, only the columns ``further_rows``
    and ``learned`` are removed.

    Args:
        batch: Columns for the update, including ``further_rows``, with B rows, and ``learned``, whether to learn from a
            session. The rules of rollout correction may reject its row and not the others.
        score: Function that computes the remaining columns of the further rows from ``tokens``, ``source`` and
            ``rollout_logprobs``. Its ``learn_mask`` excludes tokens that rollout correction rejects.
        mean_of_tokens: Whether the loss of a response is the mean over its tokens rather than their sum.
    """
    saved, learned, batch = batch.further_rows, batch.learned, batch.without("further_rows", "learned")
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
    # Estimators with whitening leave 0 on rejected tokens, so these count only if all tokens are rejected.
    counted = batch.learn_mask | (~batch.learned_responses.repeat_interleave(batch.response_lengths) & by_policy)
    sums = sums_within(torch.where(counted, batch.advantages.double(), 0.0), batch.response_lengths)
    means = sums / sums_within(counted.long(), batch.response_lengths)
    per_token = means[owner].repeat_interleave(further.response_lengths)
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
    # 4. Weight every token by the histories of its episode that contain it.
    prompts = joined.tokens[~joined.in_response].split(joined.prompt_lengths.tolist())
    lengths = joined.response_lengths.tolist()
    parts = zip(prompts, joined.response_tokens.split(lengths), joined.learn_mask.split(lengths), strict=True)
    weights = [
        weight for size in (counts + 1).tolist() for weight in token_weights(list(islice(parts, size)), mean_of_tokens)
    ]
    return joined.fill(advantages=(joined.advantages.double() * torch.cat(weights)).float())


def token_weights(rows: Sequence[tuple[Tensor, Tensor, Tensor]], mean_of_tokens: bool) -> list[Tensor]:
    """Return weights with which losses of an episode's k rows equal the mean of the losses of its k whole histories.

    A history consists of a row's response and of the responses of other rows with which its prompt begins. If a row's
    loss is a sum over its tokens, a token's weight is m/k, where m histories contain it. If it is a mean over the row's
    T learned tokens, the weight is T/k times the sum of 1/T_i over these histories, which have T_i learned tokens.

    Args:
        rows: Prompt [P], response [R] and the response's learn mask [R] of each row.

    Returns:
        Float64 weights [R] for each row.
    """
    shared = num_shared([(prompt, response) for prompt, response, _ in rows])
    learned = torch.tensor([int(mask.sum()) for *_, mask in rows], dtype=torch.float64)
    share = torch.full((len(rows),), 1 / len(rows), dtype=torch.float64)
    if mean_of_tokens:
        masks = [mask for *_, mask in rows]
        totals = [sum(int(mask[:n].sum()) for mask, n in zip(masks, sizes, strict=True)) for sizes in shared.T.tolist()]
        share = share / torch.tensor(totals).clamp(min=1)
    weights = []
    for (_, response, _), sizes, own in zip(rows, shared, learned, strict=True):
        contained = torch.arange(len(response))[:, None] < sizes
        weights.append(contained.double() @ share * (own if mean_of_tokens else 1.0))
    return weights


def num_shared(rows: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return how many response tokens of each row belong to each history of an episode, [k, k].

    Another row's history contains them if its prompt begins with everything up to them. What it samples itself is its
    own.

    Args:
        rows: Prompt [P] and response [R] of each row.
    """
    found = torch.zeros(len(rows), len(rows), dtype=torch.int64)
    for row, (prompt, response) in enumerate(rows):
        whole = torch.cat([prompt, response])
        for other, (start, _) in enumerate(rows):
            size = min(len(whole), len(start))
            common = int((whole[:size] == start[:size]).cumprod(0).sum())
            found[row, other] = len(response) if other == row else max(0, common - len(prompt))
    return found
