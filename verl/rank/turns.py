"""Computes rank metrics of conversations, both over all sampled tokens and for each policy turn.

Shapes: B conversations, K measured turns, L captured layers, D hidden width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from verl.batch import POLICY, PREFIX, RANK, TURN_RANK, Batch
from verl.rank.calculator import RepresentationMetricsCalculator

MEASURED_TURNS = 8
"""Maximum number of turns that are measured separately, starting with the first turn of a conversation."""


def measure_turns(
    calculator: RepresentationMetricsCalculator,
    states: Sequence[Tensor],
    turns: Sequence[Sequence[int]],
    max_turns: int | None,
) -> Batch:
    """Return the rank metrics of all sampled tokens in each of B conversations, as columns on the CPU.

    Args:
        states: Hidden states ``[n, L, D]`` that predict the policy's n tokens in each conversation, for all turns.
        turns: Number of tokens in each policy turn of each conversation; they sum to n per conversation.
        max_turns: Value of ``rollout.multi_turn.max_assistant_turns``.

    Returns:
        Result of :meth:`RepresentationMetricsCalculator.measure` with additional ``TURN_RANK`` columns ``[B, K, L]``.
    """
    measured = calculator.measure(list(states)).to("cpu")
    num = min(MEASURED_TURNS, max_turns or MEASURED_TURNS)
    parts: list[Tensor] = []
    places: list[tuple[int, int]] = []
    for row, (rows, sizes) in enumerate(zip(states, turns, strict=True)):
        # A single turn has the metrics of the whole conversation.
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
    """Return the rank metrics of single- or multi-turn responses, given the hidden states of all tokens.

    Args:
        max_turns: See :func:`measure_turns`.
        states: Hidden states ``[n, L, D]`` of each response.
        batch: Responses, with ``source`` if they are conversations.
    """
    if "source" not in batch:
        return calculator.measure(states)
    sources = batch.source.split(batch.response_lengths.tolist())
    sampled = [rows[(source == POLICY).to(rows.device)] for rows, source in zip(states, sources, strict=True)]
    measured = measure_turns(calculator, sampled, [turn_lengths(source) for source in sources], max_turns)
    return expand_to_response(batch.columns("source"), measured).without("source")


def expand_to_response(batch: Batch, measured: Batch) -> Batch:
    """Add the columns of ``measured``, which cover only the policy's tokens, to the matching episodes in ``batch``."""
    for name in measured.names:
        values = getattr(measured, name)
        if name.startswith(PREFIX):
            expanded = values.new_full((len(batch.by_policy), *values.shape[1:]), torch.nan)
            expanded[batch.by_policy] = values
            values = expanded
        batch.fill(**{name: values})
    return batch


def turn_lengths(source: Tensor) -> list[int]:
    """Return the number of tokens in each policy turn of one response, given its ``source [n]``."""
    runs, sizes = source.unique_consecutive(return_counts=True)
    return [int(size) for size in sizes[runs == POLICY]]
