from dataclasses import replace
from types import SimpleNamespace

import torch

from verl.config import PPOConfig, load_config
from verl.config.rollout_correction import RolloutCorrectionConfig
from verl.protocol import PolicyBatch
from verl.trainer.ppo.ray_trainer import RayPPOTrainer, mini_batches


def batch_of(mask: list[list[int]]) -> PolicyBatch:
    rows, columns = len(mask), len(mask[0])
    ids, values = torch.arange(rows)[:, None].expand(rows, columns), torch.zeros(rows, columns)
    return PolicyBatch(ids, torch.ones_like(ids), torch.tensor(mask), values, values, values, values, batch_size=[rows])


def test_mini_batches_of_filler_alone_leave_the_parameters_where_they_are():
    # Two mini-batches to learn from, a partly rejected one, and two in which nothing is left.
    batch = batch_of([[1, 1], [1, 0], [0, 0], [0, 1], [0, 0], [0, 0], [0, 0], [0, 0]])
    weight = torch.nn.Parameter(torch.tensor([1.0]))
    optimizer = torch.optim.AdamW([weight], lr=0.5, weight_decay=0.5)
    places, counts = [], []
    for mini, num_tokens, num_sequences in mini_batches(batch, 2):
        optimizer.zero_grad()
        (weight * mini.response_mask.sum()).backward()
        optimizer.step()
        places.append((mini.input_ids[:, 0].tolist(), weight.item()))
        counts.append((num_tokens, num_sequences))
    assert counts == [(3, 2), (1, 1)]
    assert [rows for rows, _ in places] == [[0, 1], [2, 3]]
    reached = places[-1][1]
    assert weight.item() == reached
    # What a step on gradients of 0 would do: moments and weight decay move the parameters.
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert abs(weight.item() - reached) > 0.1
    assert list(mini_batches(batch_of([[0, 0], [0, 0]]), 1)) == []


def test_rejected_tokens_and_responses_enter_no_loss():
    config = load_config(PPOConfig, "ppo_trainer", ["trainer.remove_clip=true"])
    correction = RolloutCorrectionConfig(["token_k1", "seq_max_k2"], ["0.5_2.0", "3.0"])
    config = replace(config, algorithm=replace(config.algorithm, rollout_correction=correction))
    # Log ratios 0, 1, 0.5 | 0, 0, 3 (a k2 of 4.5) | and two rows that are no longer learned from.
    rollout = SimpleNamespace(
        response_mask=torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 0], [1, 1, 1]]),
        rollout_logprobs=torch.tensor([[-1.0, -2.0, -1.5], [-1.0, -1.0, -4.0], [-1.0, -1.0, 0.0], [-1.0, -1.0, -1.0]]),
        truncated=torch.tensor([False, False, False, True]),
    )
    sampled = SimpleNamespace(learned=torch.tensor([True, True, False, True]), rollout=rollout)
    trainer = SimpleNamespace(config=config, metrics={})
    mask = RayPPOTrainer._learned_mask(trainer, sampled, torch.full((4, 3), -1.0))
    assert mask.tolist() == [[1, 0, 1], [0, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert trainer.metrics["rollout_corr/rollout_rs_masked_fraction"] == 4 / 11
    assert trainer.metrics["rollout_corr/rollout_rs_token_k1_masked_fraction"] == 2 / 11
    assert trainer.metrics["rollout_corr/rollout_rs_seq_max_k2_seq_masked_fraction"] == 0.25
