"""What the ranks of a test's world do with the trainer's workers."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.conftest import changed
from tests.workers.groups import gradients_of
from verl.config import PPOConfig
from verl.config.sft import SFTConfig
from verl.models.sequence_parallel import sequence_group
from verl.protocol import ConversationBatch, PolicyBatch, RankMetrics, RolloutBatch, TextBatch, ValueBatch
from verl.workers.actor import Actor
from verl.workers.critic import Critic
from verl.workers.reward_model import RewardModel
from verl.workers.sft import SFTWorker

Results = dict[str, Any]


def share(batch: Any, sequence: int) -> Any:
    """The rows of the group of ``sequence`` workers that this one belongs to."""
    groups, index = dist.get_world_size() // sequence, dist.get_rank() // sequence
    return batch[len(batch) * index // groups : len(batch) * (index + 1) // groups]


def rollout_of(batch: PolicyBatch) -> RolloutBatch:
    """Its responses, as they come from an engine that measures nothing."""
    rest = (*(torch.zeros(len(batch)) for _ in range(3)), RankMetrics.none(len(batch)))
    return RolloutBatch(batch.input_ids, batch.attention_mask, batch.response_mask, *rest, batch_size=[len(batch)])


def every_model(config: PPOConfig, sft: SFTConfig, changes: dict[str, Any], batching: dict[str, Any]) -> Results:
    """What policy, critic, reward model and supervised learner say of the same rows, and their gradients.

    Args:
        changes: of the options of all models.
        batching: how actor and critic cut micro-batches.
    """
    sequence = changes.get("ulysses_sequence_parallel_size", 1)
    assert sequence_group(sequence) is sequence_group(sequence)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    with patch("verl.workers.sft.join_world", return_value=mesh):  # these processes have joined theirs
        worker = SFTWorker(changed(sft, model=changes), None, 10)
    batch = example()
    mine = share(batch, sequence)
    mask = batch.response_mask
    num_tokens, num_sequences = int(mask.sum()), int(mask.any(dim=1).sum())
    results: Results = {}

    actor = Actor(replace(config.actor, **batching), replace(config.model, **changes), mesh, 0.8, 10, mask.shape[1])
    rollout = rollout_of(mine)
    # The fifth response has no tokens, and so no states to measure.
    plain, measured = actor.compute_logprobs(rollout), actor.compute_logprobs(rollout, [0, -1], norms)
    assert torch.equal(plain.logprobs, measured.logprobs) and torch.equal(plain.entropy, measured.entropy)
    results["logprobs"], results["entropy"] = plain.logprobs, plain.entropy
    metrics = measured.rank_metrics
    results["norms"], results["mean states"] = metrics.by_name["norm"], metrics.mean_states
    results["actor"] = gradients_of(actor.learner, lambda: actor.update(mine, num_tokens, num_sequences))

    critic = Critic(changed(config.critic, model=changes, **batching), mesh, 10)
    results["values"] = critic.compute_values(rollout)
    rows = (mine.input_ids, mine.attention_mask, mine.response_mask)
    targets = ValueBatch(*rows, 0.3 * mine.advantages, mine.old_logprobs, batch_size=[len(mine)])
    results["critic"] = gradients_of(critic.learner, lambda: critic.update(targets, num_tokens))

    judge = RewardModel(changed(config.reward_model, model=changes), mesh)
    first = batch.attention_mask.argmax(dim=1)
    rows = [ids[start:] for ids, start in zip(batch.input_ids, first, strict=True)]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    lengths = batch.attention_mask.sum(dim=1)
    read = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    texts = share(TextBatch(ids, read, batch_size=[len(batch)]), sequence)
    results["scores"] = judge.compute_scores(texts)

    learned = read * (torch.arange(ids.shape[1]) % 3 > 0)
    lesson = share(ConversationBatch(ids, read, learned, batch_size=[len(batch)]), sequence)
    results["evaluation"] = worker.evaluate(lesson)
    total = int(learned[:, 1:].sum())
    results["sft"] = gradients_of(worker.learner, lambda: worker.train_step(lesson, total))
    return results


def norms(responses: list[Tensor]) -> RankMetrics:
    """A stand-in for rank metrics: the norm of each layer's states [T, L, D] of a response."""
    return RankMetrics.from_rows(
        [{"metric.norm": s.float().norm(dim=(0, 2)), "mean_states": s.float().sum(dim=0)} for s in responses], 9
    )


def example() -> PolicyBatch:
    """Eight responses of at most 9 tokens to prompts of at most 6; of the fifth nothing is learned."""
    generator = torch.Generator().manual_seed(0)
    prompts, responses = [6, 2, 4, 1, 3, 5, 2, 6], [9, 3, 1, 7, 4, 8, 2, 5]
    columns = torch.arange(15)
    mask = torch.stack(
        [((6 - p <= columns) & (columns < 6 + r)).long() for p, r in zip(prompts, responses, strict=True)]
    )
    response_mask = mask[:, 6:].clone()
    response_mask[4] = 0
    ids = torch.randint(7, 100, mask.shape, generator=generator)
    numbers = [torch.randn(8, 9, generator=generator) * response_mask for _ in range(4)]
    old, rollout, reference = (-4 + 0.3 * n for n in numbers[:3])
    return PolicyBatch(ids, mask, response_mask, old, rollout, reference, numbers[3], batch_size=[8])
