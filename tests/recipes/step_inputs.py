"""The inputs of reward transforms and advantage estimators, made by hand."""

from collections.abc import Sequence
from typing import Any

import torch
from conftest import rank_metrics

from verl.data.prompt_rows import PromptRecord
from verl.data.signal_inputs import AdvantageInputs, RewardInputs
from verl.rewards import Score


def responses(
    correct: Sequence[int],
    lengths: Sequence[int] | None = None,
    groups: Sequence[int] | None = None,
    truncated: Sequence[int] | None = None,
    extras: Sequence[dict[str, Any]] | None = None,
    step: int = 1,
) -> dict[str, Any]:
    """Fields of as many responses as ``correct`` names, of at most 16 tokens."""
    size = len(correct)
    tokens = torch.tensor(lengths or [4] * size)
    mask = (torch.arange(16) < tokens[:, None]).long()
    record = PromptRecord(0, [1], "set", "1", {}, [], False)
    found = [
        Score(score=c, correctness=bool(c), boxed=False, reason="", answer="", reward_extra_info={}) for c in correct
    ]
    for score, extra in zip(found, extras or [{}] * size, strict=True):
        score["reward_extra_info"] = extra
    return {
        "step": step,
        "total_steps": 10,
        "max_response_length": 16,
        "records": [record] * size,
        "texts": [""] * size,
        "verdicts": found,
        "responses": torch.zeros_like(mask),
        "response_mask": mask,
        "rollout_logprobs": torch.zeros(mask.shape),
        "lengths": tokens,
        "truncated": torch.tensor(truncated or [0] * size).bool(),
        "group_ids": torch.tensor(groups or [0] * size),
        "learned": torch.ones(size, dtype=torch.bool),
        "scores": torch.tensor(correct).double(),
        "correct": torch.tensor(correct).bool(),
        "rank_metrics": rank_metrics({"Effective Rank": torch.ones(size, dtype=torch.float64)}),
    }


def reward_inputs(*args: Any, **fields: Any) -> RewardInputs:
    """As ``responses``, with the scores as rewards."""
    values = responses(*args, **fields)
    return RewardInputs(**values, rewards=values["scores"].clone())


def advantage_inputs(*args: Any, **fields: Any) -> AdvantageInputs:
    """The same for an advantage estimator."""
    values = responses(*args, **fields)
    rewards, mask = values["scores"].clone(), values["response_mask"]
    last = torch.nn.functional.one_hot(values["lengths"] - 1, 16)
    return AdvantageInputs(**values, rewards=rewards, token_rewards=rewards[:, None] * last, learned_mask=mask)
