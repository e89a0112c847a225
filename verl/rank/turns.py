"""Rank metrics of conversations: of all that the policy sampled, and of each of its turns.

Legend: B conversations, K turns that are measured, L captured layers, D hidden width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from verl.batch import POLICY, PREFIX, RANK, TURN_RANK, Batch
from verl.rank.calculator import RepresentationMetricsCalculator

MEASURED_TURNS = 8
"""Turns of a conversation with metrics of their own, the first ones."""


def measure_turns(
    calculator: RepresentationMetricsCalculator,
    states: Sequence[Tensor],
    turns: Sequence[Sequence[int]],
    max_turns: int | None,
) -> Batch:
    """Return the rank metrics of conversations, columns on the CPU; Z has the rows of all sampled tokens in order.

    Args:
        states: B, the states [n, L, D] that the policy's tokens were sampled from, one turn after another.
        turns: B, the tokens of each turn; their sum is n.
        max_turns: ``rollout.multi_turn.max_assistant_turns``.

    Returns:
        What :meth:`RepresentationMetricsCalculator.measure` returns, with ``TURN_RANK`` columns [B, K, L].
    """
    measured = calculator.measure(list(states)).to("cpu")
    num = min(MEASURED_TURNS, max_turns or MEASURED_TURNS)
    parts: list[Tensor] = []
    places: list[tuple[int, int]] = []
    for row, (rows, sizes) in enumerate(zip(states, turns, strict=True)):
        # The only turn is the whole.
        split = rows.split(list(sizes))[:num] if len(sizes) > 1 else ()
        parts += split
        places += [(row, turn) for turn in range(len(split))]
    of_turns = calculator.measure(parts).to("cpu").rank_metrics if parts else {}
    columns = {}
    for name, values in measured.rank_metrics.items():
        column = values.new_full((len(states), num, values.shape[1]), torch.nan)
        column[:, 0] = values
        if parts:
            column[torch.tensor(places).unbind(dim=1)] = of_turns[name]
        columns[TURN_RANK + name] = column
    wanted = [name for name in measured.names if name.startswith((RANK, PREFIX)) or name == "mean_states"]
    return measured.columns(*wanted).fill(**columns)


def measure_responses(
    calculator: RepresentationMetricsCalculator, max_turns: int | None, states: list[Tensor], batch: Batch
) -> Batch:
    """Return the rank metrics of responses of one turn or several, from the states of all their tokens.

    Args:
        max_turns: as of :func:`measure_turns`.
        states: B, [n, L, D] each.
        batch: the responses, with ``source`` where they are conversations.
    """
    if "source" not in batch:
        return calculator.measure(states)
    sources = batch.source.split(batch.response_lengths.tolist())
    sampled = [rows[(source == POLICY).to(rows.device)] for rows, source in zip(states, sources, strict=True)]
    measured = measure_turns(calculator, sampled, [turn_lengths(source) for source in sources], max_turns)
    return expand_to_response(batch.columns("source"), measured).without("source")


def expand_to_response(batch: Batch, measured: Batch) -> Batch:
    """Add to ``batch`` the columns ``measured`` of the same episodes without their environments' tokens."""
    for name in measured.names:
        values = getattr(measured, name)
        if name.startswith(PREFIX):
            expanded = values.new_full((len(batch.by_policy), *values.shape[1:]), torch.nan)
            expanded[batch.by_policy] = values
            values = expanded
        batch.fill(**{name: values})
    return batch


def turn_lengths(source: Tensor) -> list[int]:
    """Return the tokens of each turn of the policy in one response with ``source [n]``."""
    runs, sizes = source.unique_consecutive(return_counts=True)
    return [int(size) for size in sizes[runs == POLICY]]
