"""Responses with their prompts and verdicts.

Legend: G prompts, n responses to each, B = G n responses, neighbours where they share a prompt.
"""

from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from verl.data.prompt_rows import PromptRecord
from verl.data.prompts import TokenizedPrompts
from verl.protocol import RolloutBatch
from verl.rewards import Score
from verl.rewards.pool import PendingScores


class FirstRound(NamedTuple):
    """What ``rollout.regenerate`` may have replaced."""

    records: list[PromptRecord]
    """The prompts as the data set has them, G."""
    results: list[Score]
    """The verdicts on the first responses to each, B."""


@dataclass(frozen=True)
class Sampled:
    """Responses whose verification may still be running."""

    prompts: TokenizedPrompts
    rollout: RolloutBatch
    texts: list[str]
    """What verifiers read of each response, B."""
    pending: PendingScores
    learned: Tensor
    """[B] bool, false for responses that only fill up a batch."""
    replayed: Tensor | None = None
    """[B] bool, true for responses that were sampled in an earlier step; None unless ``algorithm.recompose`` made the
    batch."""

    first: FirstRound | None = None
    """None without ``rollout.regenerate``."""

    @property
    def first_records(self) -> list[PromptRecord]:
        """The prompts as the data set has them, G."""
        return self.prompts.records if self.first is None else self.first.records

    @property
    def first_results(self) -> list[Score]:
        """The verdicts on the first responses to each, B."""
        return self.pending.result() if self.first is None else self.first.results

    @property
    def sources(self) -> list[str]:
        """The data source of each response, B."""
        n = len(self.rollout) // len(self.prompts.records)
        return [record.data_source for record in self.prompts.records for _ in range(n)]

    @property
    def fresh(self) -> Tensor | slice:
        """Index of the responses of this step."""
        return slice(None) if self.replayed is None else (~self.replayed).nonzero().flatten()

    @property
    def updated(self) -> Tensor | None:
        """[B'] int64, the responses that updates take; None: all, those that are not learned from among them."""
        return None if self.replayed is None else self.learned.nonzero().flatten()


def select(sampled: Sampled, groups: Tensor, n: int) -> Sampled:
    """The groups with these indices, of ``n`` responses each."""
    rows = (groups[:, None] * n + torch.arange(n)).flatten()
    prompts = replace(
        sampled.prompts,
        records=[sampled.prompts.records[i] for i in groups.tolist()],
        tokens=sampled.prompts.tokens[groups],
    )
    results = sampled.pending.result()
    pending = finished([results[i] for i in rows.tolist()])
    texts = [sampled.texts[i] for i in rows.tolist()]
    first = sampled.first
    if first is not None:
        first = FirstRound([first.records[i] for i in groups.tolist()], [first.results[i] for i in rows.tolist()])
    return Sampled(prompts, sampled.rollout[rows], texts, pending, sampled.learned[rows], first=first)


def join(parts: list[Sampled]) -> Sampled:
    """All groups of the parts, one after another."""
    # torch.cat is not annotated for tensorclasses.
    tokens: Any = torch.cat([cast(Any, part.prompts.tokens) for part in parts])
    rollout: Any = torch.cat([cast(Any, part.rollout) for part in parts])
    prompts = TokenizedPrompts([record for part in parts for record in part.prompts.records], tokens)
    texts = [text for part in parts for text in part.texts]
    results = [result for part in parts for result in part.pending.result()]
    first = None
    if any(part.first is not None for part in parts):
        records = [record for part in parts for record in part.first_records]
        first = FirstRound(records, [result for part in parts for result in part.first_results])
    learned = torch.cat([part.learned for part in parts])
    return Sampled(prompts, rollout, texts, finished(results), learned, first=first)


def replaced(sampled: Sampled, places: list[int], again: Sampled) -> Sampled:
    """The groups of ``sampled``, those in ``places`` (ascending) from ``again``."""
    num, n = len(sampled.prompts.records), len(sampled.texts) // len(sampled.prompts.records)
    order = torch.arange(num)
    order[torch.tensor(places)] = num + torch.arange(len(places))
    return replace(select(join([sampled, again]), order, n), first=sampled.first)


def finished(scores: list[Score]) -> PendingScores:
    """Verdicts that are already known."""
    future: PendingScores = Future()
    future.set_result(scores)
    return future
