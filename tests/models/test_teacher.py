"""Learning from a teacher: the gradients of any split into workers and micro-batches are those of float64."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GraniteConfig

from tests.kit import changed, save_random_model
from tests.models.models_in_worlds import counts, example, follow_policy, learn_from_teacher
from tests.workers.groups import relative_difference
from verl.algorithms.divergence import divergence, top_k_events
from verl.algorithms.kl import low_var_kl
from verl.batch import Batch
from verl.config import PPOConfig
from verl.single_controller.roles import ModelWorkers

pytestmark = pytest.mark.slow

PACKED = {"use_remove_padding": True, "share_prompts": True}
SEQUENCES = {"use_remove_padding": True, "ulysses_sequence_parallel_size": 2}
SMALL = {"logits_chunk_size": 7, "use_remove_padding": False, "share_prompts": False}
BY_TOKENS = {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 30, "log_prob_max_token_len_per_gpu": 40}
SPLITS: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (1, {"logits_chunk_size": 1024}, {"micro_batch_size_per_gpu": 64}),
    (1, PACKED | {"logits_chunk_size": 5}, {"micro_batch_size_per_gpu": 3}),
    (2, SMALL, {"micro_batch_size_per_gpu": 3}),
    (2, PACKED, BY_TOKENS),
    (2, SEQUENCES, BY_TOKENS),
]
HEAT, TEACHER_HEAT, TOKENS = 0.8, 1.3, 262
"""Temperatures of sampled tokens and of whole distributions, and the number of the embedded tokenizer's tokens."""


@pytest.fixture(scope="module")
def made_teacher(tiny_model: Path, tmp_path_factory) -> Callable[..., Path]:
    """Builder of models of another architecture and size than the policy, with its tokenizer."""

    def made(**options: Any) -> Path:
        folder = tmp_path_factory.mktemp("teacher")
        save_random_model(GraniteConfig(intermediate_size=64, num_attention_heads=4, **options), folder)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tiny_model / file, folder)
        return folder

    return made


@pytest.fixture(scope="module")
def teacher(made_teacher) -> Path:
    """Teacher with scaled logits and padding in its head."""
    sizes = {"vocab_size": TOKENS + 18, "hidden_size": 48, "num_hidden_layers": 3}
    return made_teacher(**sizes, logits_scaling=0.5, initializer_range=0.2)


@pytest.fixture(scope="module")
def other_teacher(made_teacher) -> Path:
    """Teacher whose head has the policy's size."""
    return made_teacher(vocab_size=TOKENS, hidden_size=32, num_hidden_layers=1, initializer_range=0.4)


@pytest.fixture(scope="module")
def config(small_config: PPOConfig, teacher: Path) -> PPOConfig:
    return changed(
        small_config,
        data={"max_prompt_length": 8, "max_response_length": 9},
        actor={"use_kl_loss": False, "optim": {"grad_clip": 1e9}},
        rollout={"temperature": HEAT},
        teacher={"model": {"path": str(teacher)}, "temperature": TEACHER_HEAT},
        reward_manager={"add_adv": False, "add_reward": False},
        trainer={"n_gpus_per_node": 4},
    )


@pytest.fixture(scope="module")
def rows() -> Batch:
    """The example, of which half of the first response and the whole of the third are not learned from."""
    batch = example()
    learned = batch.padded("learn_mask")
    learned[0, 4:] = learned[2] = False
    return batch.fill(learn_mask=learned)


def logits_of(model: Any, batch: Batch) -> Tensor:
    """Return the logits of the batch's response tokens, [M, V], one row at a time."""
    parts = [model(row.tokens[None]).logits[0, -row.longest_response - 1 : -1] for row in batch.split(1)]
    return torch.cat([part[:, :TOKENS] for part in parts])


def in_float64(config: PPOConfig, batch: Batch) -> tuple[Tensor, float, dict[str, Tensor]]:
    """Return the teachers' log-probabilities [M], and the mean loss of the learned tokens with its gradients."""
    options, tokens = config.teacher, batch.response_tokens[:, None]
    paths = [config.model.path] if options.is_policy else [model.path for model in options.models.values()]
    student, *teachers = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64) for path in (config.model.path, *paths)
    )
    p = logits_of(student, batch)
    with torch.no_grad():
        read = batch.after(batch.teacher_prompts) if "teacher_prompts" in batch else batch
        index = batch.teacher.tolist() if "teacher" in batch else [0] * len(batch)
        q = torch.cat([logits_of(teachers[i], row) for i, row in zip(index, read.split(1), strict=True)])
    sampled = (q / HEAT).log_softmax(dim=1).gather(1, tokens)[:, 0]
    if options.is_exact:
        pair = ((p / options.temperature).log_softmax(dim=1), (q / options.temperature).log_softmax(dim=1))
        losses = divergence(
            options.loss, *(top_k_events(*pair, options.top_k) if options.top_k else pair), options.beta
        )
    else:
        x = sampled - (p / HEAT).log_softmax(dim=1).gather(1, tokens)[:, 0]
        losses = low_var_kl(-x, torch.zeros_like(x))
    limit = options.loss_max_clamp or 1e9
    losses = losses.clamp(-limit, limit)
    if "taught" in batch:
        losses = losses * batch.taught.repeat_interleave(batch.response_lengths)
    loss = losses[batch.learn_mask].mean()
    (options.coef * loss).backward()
    return sampled, loss.item(), {name: p.grad for name, p in student.named_parameters()}


@pytest.mark.parametrize(
    "options",
    [
        {"loss": "reverse_kl"},
        {"loss": "forward_kl", "top_k": 5, "coef": 2.0},
        {"loss": "jsd", "beta": 0.2, "loss_max_clamp": 0.4},
        {"loss": "k3"},
        {"loss": "reverse_kl", "prompt": "hints.py:solved"},
        {"loss": "jsd", "prompt": "hints.py:solved", "model": {"path": "policy"}, "loss_max_clamp": 1.0},
        {"loss": "forward_kl", "model": {"path": "policy"}, "update_rate": 0.5, "prompt": "hints.py:solved"},
        {"loss": "reverse_kl", "by_source": "two", "prompt": "hints.py:solved"},
        {"loss": "k3", "by_source": "two"},
    ],
    ids=lambda options: "-".join(str(value) for value in options.values() if isinstance(value, str)),
)
def test_gradients_of_any_split_match_float64(options, worlds, config: PPOConfig, rows: Batch, other_teacher: Path):
    if "by_source" in options:
        options = options | {"by_source": [f"b={other_teacher}"], "model": {"fsdp": {"param_offload": True}}}
        rows = rows.columns(*rows.names).fill(teacher=torch.tensor([1, 0, 0, 1, 0] * len(rows))[: len(rows)])
    config = changed(config, teacher=options | {"use_task_rewards": False})
    if "prompt" in options:
        # As the trainer does; the teacher's prompts are longer, shorter, or the same.
        whole = zip(rows.tokens.split(rows.lengths.tolist()), rows.prompt_lengths.tolist(), strict=True)
        prompts = [ids[:length].tolist() for ids, length in whole]
        others = [[11, 12, *ids] if i % 3 == 0 else ids[-1:] if i % 3 == 1 else ids for i, ids in enumerate(prompts)]
        rows = rows.columns(*rows.names).fill(teacher_prompts=others, taught=torch.arange(len(rows)) != 1)
    sampled, loss, expected = in_float64(config, rows)
    for workers, model, batching in SPLITS:
        sequence = model.get("ulysses_sequence_parallel_size", 1)
        # As the trainer does: a teacher's rows are dealt evenly, with copies that are not learned from.
        dealt, order = ModelWorkers(SimpleNamespace(world_size=workers), sequence)._to_learn(rows)
        results = worlds[workers].run(learn_from_teacher, config, dealt, model, batching)
        found = torch.cat([found for found, _, _ in results[::sequence]]).double()
        expected_there = rows.columns().fill(teacher_logprobs=sampled)[order].teacher_logprobs
        torch.testing.assert_close(found, expected_there, atol=2e-5, rtol=1e-6)
        for _, metrics, gradients in results:
            assert relative_difference(expected, gradients) < 2e-5, (workers, model)
            assert metrics["actor/teacher_loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("workers", [1, 2])
def test_teacher_follows_the_policy(workers: int, worlds, config: PPOConfig, rows: Batch):
    model = {"path": "policy", "fsdp": {"param_offload": True}}
    config = changed(config, teacher={"update_rate": 0.25, "model": model}, actor={"optim": {"lr": 0.1}})
    for found in worlds[workers].run(follow_policy, config, rows, 0.25):
        (first, average), *later = found
        assert all(torch.equal(average[name], value) and value.dtype == torch.float32 for name, value in first.items())
        expected = {name: value.double() for name, value in first.items()}
        for policy, average in later:
            expected = {name: 0.75 * expected[name] + 0.25 * policy[name].double() for name in expected}
            assert relative_difference(expected, average) < 1e-6 < relative_difference(first, average)


def served(config: PPOConfig, rows: Batch, logprobs: Tensor, ids: Tensor) -> tuple[PPOConfig, Batch]:
    """Return the config of a teacher on a server, and the rows with its most likely tokens [M, k]."""
    elsewhere = {"model": {"path": "none"}, "server": {"address": "http://t/v1"}}
    columns = {"teacher_top_k_logprobs": logprobs.float(), "teacher_top_k_ids": ids}
    scored = rows.columns(*rows.names).fill(**columns, teacher_logprobs=torch.zeros(len(ids)))
    return changed(config, rollout={"temperature": 1.0}, teacher=elsewhere), scored


def test_servers_top_k_gives_the_same_gradients(worlds, config: PPOConfig, rows: Batch):
    options = {"loss": "reverse_kl", "top_k": 5, "temperature": 1.0, "use_task_rewards": False}
    config = changed(config, teacher=options)
    teacher = AutoModelForCausalLM.from_pretrained(config.teacher.model.path, dtype=torch.float64)
    with torch.no_grad():
        likeliest = logits_of(teacher, rows).log_softmax(dim=1).topk(5)
    _, loss, expected = in_float64(config, rows)
    config, rows = served(config, rows, *likeliest)
    for workers, model, batching in SPLITS[1:]:
        for _, metrics, gradients in worlds[workers].run(learn_from_teacher, config, rows, model, batching):
            assert relative_difference(expected, gradients) < 2e-5, (workers, model)
            assert metrics["actor/teacher_loss"] == pytest.approx(loss, rel=1e-5)


def test_ids_of_a_server_are_exact_in_bfloat16(worlds, config: PPOConfig, rows: Batch):
    options = {"loss": "forward_kl", "top_k": 3, "temperature": 1.0, "use_task_rewards": False}
    num_tokens = len(rows.response_tokens)
    logprobs, ids = torch.tensor([0.5, 0.3, 0.1]).log(), torch.tensor([257, 259, 261])  # in bfloat16, 256 and twice 260
    config = changed(config, teacher=options)
    config, rows = served(config, rows, logprobs.repeat(num_tokens, 1), ids.repeat(num_tokens, 1))
    found = []
    for dtype in ("float32", "bfloat16"):
        model = {"param_dtype": dtype}
        ((_, metrics, _),) = worlds[1].run(learn_from_teacher, config, rows, model, SPLITS[0][2])
        found.append(metrics["actor/teacher_loss"])
    assert found[1] == pytest.approx(found[0], rel=3e-3)


def test_teacher_loss_is_added_to_the_policy_loss(worlds, config: PPOConfig, rows: Batch):
    split = (rows, {"logits_chunk_size": 1024}, {"micro_batch_size_per_gpu": 64})
    found = {}
    for name, options in {
        "both": {"loss": "reverse_kl", "coef": 0.5, "use_task_rewards": True},
        "teacher": {"loss": "reverse_kl", "coef": 0.5, "use_task_rewards": False},
        "policy": {"loss": None, "use_task_rewards": True},
    }.items():
        ((_, _, found[name]),) = worlds[1].run(learn_from_teacher, changed(config, teacher=options), *split)
    added = {name: found["policy"][name] + gradient for name, gradient in found["teacher"].items()}
    assert relative_difference(added, found["both"]) < 1e-5 < relative_difference(found["policy"], found["both"])
    assert counts(rows)[0] < len(rows.response_tokens)
