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
from verl.batch import Batch
from verl.config import PPOConfig
from verl.config.sft import SFTConfig
from verl.data.conversations import conversation_batch
from verl.models.micro_batches import scored_by_teachers
from verl.models.offload import full_tensor
from verl.models.sequence_parallel import sequence_group
from verl.models.tokenizer import load_tokenizer, num_ids
from verl.workers.actor import Actor
from verl.workers.critic import Critic, RewardModel
from verl.workers.sft import SFTWorker
from verl.workers.teacher import UpdateTeacher, load_teachers, update_average

Learned = tuple[dict[str, float], dict[str, Tensor]]
"""Metrics and gradients of an update."""


def share(batch: Any, sequence: int) -> Any:
    """The rows of the group of ``sequence`` workers that this one belongs to."""
    groups, index = dist.get_world_size() // sequence, dist.get_rank() // sequence
    return batch[len(batch) * index // groups : len(batch) * (index + 1) // groups]


def every_model(
    config: PPOConfig, sft: SFTConfig, changes: dict[str, Any], batching: dict[str, Any], order: list[int]
) -> tuple[Batch, dict[str, Learned]]:
    """What policy, critic, reward model and supervised learner say of the example's rows, and what they learn.

    Args:
        changes: of the options of all models.
        batching: how actor and critic cut micro-batches.
        order: of the rows.

    Returns:
        This worker's rows with what the models say, and metrics and gradients by learner.
    """
    sequence = changes.get("ulysses_sequence_parallel_size", 1)
    assert sequence_group(sequence) is sequence_group(sequence)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    with patch("verl.workers.sft.join_world", return_value=mesh):  # these processes have joined theirs
        worker = SFTWorker(changed(sft, model=changes), None, 10)
    batch = example()[order]
    mine = share(batch, sequence)
    num_tokens, num_sequences = counts(batch)
    learned: dict[str, Learned] = {}

    options, correction = replace(config.actor, **batching), config.algorithm.rollout_correction
    actor = Actor(options, correction, replace(config.model, **changes), mesh, 0.8, 10, batch.width)
    # The fifth response has no tokens, and so no states to measure.
    found, plain = actor.compute_logprobs(mine, [0, -1], norms), actor.compute_logprobs(mine)
    assert torch.equal(plain.logprobs, found.logprobs) and torch.equal(plain.entropy, found.entropy)
    learned["actor"] = gradients_of(actor.learner, lambda: actor.update(mine, num_tokens, num_sequences))

    critic = Critic(changed(config.critic, model=changes, **batching), mesh, 10)
    found.merge(critic.compute_values(mine))
    targets = mine.columns("tokens", "learn_mask").fill(values=0.3 * mine.advantages, returns=mine.old_logprobs)
    learned["critic"] = gradients_of(critic.learner, lambda: critic.update(targets, num_tokens))

    judge = RewardModel(changed(config.reward_model, model=changes), mesh)
    rows = [ids.tolist() for ids in batch.tokens.split(batch.lengths.tolist())]
    found.fill(scores=judge.compute_scores(share(Batch.of([[]] * 8, rows), sequence)).scores)

    whole = conversation_batch([(ids, [int(i % 3 > 0) for i in range(len(ids))]) for ids in rows])
    lesson = share(whole, sequence)
    told = worker.evaluate(lesson)
    found.fill(total_logprob=told.total_logprob, num_learned=told.num_learned)
    learned["sft"] = gradients_of(worker.learner, lambda: worker.train_step(lesson, int(whole.learn_mask.sum())))
    return found, learned


def counts(batch: Batch) -> tuple[int, int]:
    """Tokens to learn from, and responses that have any."""
    return int(batch.learn_mask.sum()), int(batch.padded("learn_mask").any(dim=1).sum())


def norms(responses: list[Tensor], _: Batch) -> Batch:
    """A stand-in for rank metrics: the norm of each layer's states [T, L, D] of a response."""
    measured = Batch(torch.zeros(len(responses)).long(), torch.tensor([len(states) for states in responses]))
    return measured.fill(
        **{"rank/norm": torch.stack([states.float().norm(dim=(0, 2)) for states in responses])},
        mean_states=torch.stack([states.float().sum(dim=0) for states in responses]),
    )


def example() -> Batch:
    """Eight responses of at most 9 tokens, the fifth of none, to five prompts of at most 6."""
    generator = torch.Generator().manual_seed(0)

    def ids(lengths: list[int]) -> list[list[int]]:
        return [torch.randint(7, 100, (length,), generator=generator).tolist() for length in lengths]

    prompts = ids([6, 2, 4, 1, 3])
    batch = Batch.of([prompts[i] for i in (0, 1, 2, 3, 4, 0, 1, 0)], ids([9, 3, 1, 7, 0, 8, 2, 5]))
    num_response = len(batch.response_tokens)
    old, rollout, reference, advantages = torch.randn(4, num_response, generator=generator)
    return batch.fill(
        learn_mask=torch.ones(num_response, dtype=torch.bool),
        old_logprobs=-4 + 0.3 * old,
        rollout_logprobs=-4 + 0.3 * rollout,
        ref_logprobs=-4 + 0.3 * reference,
        advantages=advantages,
    )


def learn_from_teacher(
    config: PPOConfig, rows: Batch, model: dict[str, Any], batching: dict[str, Any]
) -> tuple[Tensor, dict[str, float], dict[str, Tensor]]:
    """Return the teacher's log-probabilities of all rows, and metrics and gradients of an update that uses them."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    config = changed(config, model=model, teacher={"model": model}, actor=batching)
    sequence, (num_tokens, num_sequences) = config.model.ulysses_sequence_parallel_size, counts(rows)
    correction = config.algorithm.rollout_correction
    actor = Actor(config.actor, correction, config.model, mesh, config.rollout.temperature, 10, rows.width)
    tokenizer = load_tokenizer(config.model.path, False)
    teachers = load_teachers(config, mesh, actor, tokenizer)
    if config.teacher.loss is not None:
        actor.teacher = UpdateTeacher(config.teacher, teachers, actor, num_ids(tokenizer))
    mine = share(rows, sequence)
    read = mine.after(mine.teacher_prompts) if "teacher_prompts" in mine else mine
    if "teacher" in mine and read is not mine:
        read.fill(teacher=mine.teacher)
    if "teacher_logprobs" not in mine:
        mine.fill(
            teacher_logprobs=scored_by_teachers(read, lambda i, part: teachers[i].compute_logprobs(part)).logprobs
        )
    metrics, gradients = gradients_of(actor.learner, lambda: actor.update(mine, num_tokens, num_sequences))
    return mine.teacher_logprobs, metrics, gradients


def follow_policy(config: PPOConfig, rows: Batch, rate: float) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Return the policy and its moving average after none, one and two updates, each with its parameters by name."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    actor = Actor(config.actor, config.algorithm.rollout_correction, config.model, mesh, 1.0, 10, rows.width)
    (average,) = load_teachers(config, mesh, actor, load_tokenizer(config.model.path, False))
    found = []
    for step in range(3):
        if step:
            actor.update(share(rows, 1), *counts(rows))
            update_average(average, actor, rate)
        models = (actor.model, average.model)
        with actor.parameters.loaded(), average.parameters.loaded():
            found.append(tuple({n: full_tensor(p).clone() for n, p in m.named_parameters()} for m in models))
    return found
