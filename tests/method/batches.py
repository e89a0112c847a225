"""Batches of responses made by hand, and methods as the trainer makes them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from conftest import changed, rank_columns

from verl.batch import Batch
from verl.config import PPOConfig
from verl.data.prompt_record import PromptRecord
from verl.method.calls import MethodCalls
from verl.verifiers.verdict import Verdict

RECORDS = [
    PromptRecord(uid, [1, uid + 2], "set", "7", {}, [{"role": "user", "content": f"{uid}"}], False) for uid in range(8)
]
"""The training data."""


def verdict(score: float, extra: dict[str, Any] | None = None) -> Verdict:
    return Verdict(score > 0, False, "exact", "7", score, extra or {})


def batch_of(
    scores: Sequence[float],
    lengths: Sequence[int] | None = None,
    uids: Sequence[int] | None = None,
    step: int = 1,
    extras: Sequence[dict[str, Any]] | None = None,
    width: int = 16,
    **columns: Any,
) -> Batch:
    """Responses with these scores, of at most 16 tokens; ``uids`` are those of their prompts."""
    num = len(scores)
    lengths, uids = lengths or [4] * num, uids or [0] * num
    records = [RECORDS[uid] for uid in uids]
    tokens = [token for record, n in zip(records, lengths, strict=True) for token in [*record.input_ids, *[3] * n]]
    batch = Batch(torch.full((num,), 2), torch.tensor(lengths), width)
    batch.fill(
        tokens=torch.tensor(tokens),
        rollout_logprobs=torch.arange(sum(lengths)).float() / 3,
        truncated=torch.zeros(num, dtype=torch.bool),
        **rank_columns({"m": torch.arange(num).double() / 3}),
        records=records,
        texts=[f"text {i}" for i in range(num)],
        verdicts=[verdict(s, extra) for s, extra in zip(scores, extras or [{}] * num, strict=True)],
        scores=torch.tensor(scores, dtype=torch.float32),
        correct=torch.tensor([s > 0 for s in scores]),
        group=torch.tensor(uids),
        learned=torch.ones(num, dtype=torch.bool),
        step=torch.full((num,), step),
    )
    return batch.fill(**columns)


def method_of(config: PPOConfig, path: str, tokenizer: Any = None, **kwargs: Any) -> MethodCalls:
    """The method with this import path in a run of 10 steps, 2 prompts a step, 2 responses to each of 16 tokens."""
    config = changed(config, rollout={"n": 2}, data={"train_batch_size": 2, "max_response_length": 16})
    config = replace(config, trainer=replace(config.trainer, method=path, method_kwargs=kwargs))
    return MethodCalls(config, tokenizer, RECORDS, 10)
