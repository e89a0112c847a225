"""Sequences shared by several workers, and rows without padding: every model over real FSDP2 and gloo."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedConfig,
    Qwen2Config,
)

from tests.models.models_in_worlds import Results, every_model, run_world
from verl.config import PPOConfig, SFTConfig, load_config
from verl.models.sequence_parallel import gather_heads, gather_tokens, sequence_group, split_heads
from verl.utils.distributed import WorkerPlace, join_world


@pytest.fixture(scope="module")
def models(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random models whose two key and value heads serve four query heads."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    for name, auto in (
        ("policy", AutoModelForCausalLM),
        ("critic", AutoModelForTokenClassification),
        ("judge", AutoModelForSequenceClassification),
    ):
        config: PreTrainedConfig = Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.2,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            num_labels=1,
        )
        auto.from_config(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return {path.name: path for path in folder.iterdir()}


@pytest.fixture(scope="module")
def configs(models: dict[str, Path]) -> tuple[PPOConfig, SFTConfig]:
    overrides = f"""
        model.path={models["policy"]} critic.model.path={models["critic"]} reward_model.model.path={models["judge"]}
        reward_model.enable=true reward_model.micro_batch_size_per_gpu=3 algorithm.adv_estimator=gae
        critic.micro_batch_size_per_gpu=3 actor.micro_batch_size_per_gpu=3 actor.log_prob_micro_batch_size_per_gpu=3
        actor.entropy_coeff=0.05 actor.use_kl_loss=true model.logits_chunk_size=4
    """.split()
    lessons = [f"model.path={models['policy']}", "data.micro_batch_size_per_gpu=3", "trainer.n_gpus_per_node=4"]
    sft = load_config(SFTConfig, "sft", lessons)
    return load_config(PPOConfig, "ppo_trainer", overrides), sft


@pytest.fixture(scope="module")
def alone(configs: tuple[PPOConfig, SFTConfig]) -> Results:
    """One worker, rows padded, the head at once."""
    changes = {"use_remove_padding": False, "logits_chunk_size": 0}
    return run_world(1, every_model, *configs, changes, {})[0]


PACKED = {"use_remove_padding": True}
SHARED_BY_2, SHARED_BY_4 = (PACKED | {"ulysses_sequence_parallel_size": size} for size in (2, 4))
LAYOUTS = {
    "1 worker, all rows at once": (1, {}, {"micro_batch_size_per_gpu": 64}),
    "2 workers, micro-batches by tokens": (2, {}, {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 30}),
    "1 worker, packed": (1, PACKED, {}),
    "2 workers to a sequence": (2, SHARED_BY_2, {}),
    "2 groups of 2": (4, SHARED_BY_2, {}),
    # More than there are heads of keys and values.
    "4 workers to a sequence": (4, SHARED_BY_4, {}),
}
"""Name -> workers, changes of all models' options, and of how actor and critic cut micro-batches."""


def assert_same_learning(found: tuple[Results, Results], expected: tuple[Results, Results]) -> None:
    metrics, gradients = found
    assert metrics.keys() == expected[0].keys()
    for name, value in metrics.items():
        assert value == pytest.approx(expected[0][name], abs=1e-5, rel=1e-5), name
    flat, reference = (
        np.concatenate([values[name].ravel() for name in sorted(values)]) for values in (gradients, expected[1])
    )
    assert np.linalg.norm(reference) > 0
    assert np.linalg.norm(flat - reference) < 1e-5 * np.linalg.norm(reference)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_model_learns_the_same_in_every_layout(name: str, configs, alone: Results):
    world_size, changes, batching = LAYOUTS[name]
    sequence = changes.get("ulysses_sequence_parallel_size", 1)
    workers = run_world(world_size, every_model, *configs, changes, batching)
    for quantity in ("logprobs", "entropy", "norms", "mean states", "values", "scores", "evaluation"):
        assert alone[quantity].std() > 0.05, quantity
        for first in range(sequence):
            # All workers of a group know the results of its rows.
            found = np.concatenate([results[quantity] for results in workers[first::sequence]])
            np.testing.assert_allclose(found, alone[quantity], atol=1e-5, rtol=0, err_msg=quantity)
    for learner in ("actor", "critic", "sft"):
        for results in workers:
            assert_same_learning(results[learner], alone[learner])


def exchanged(place: WorkerPlace) -> Results:
    join_world(place)
    group = sequence_group(2)
    assert group is not None and group is sequence_group(2)
    # Heads and tokens by number: head h, token t of rank r holds 100 h + 10 r + t.
    states = torch.tensor([[100.0 * h + 10 * place.rank + t for t in range(3)] for h in range(2)])[..., None]
    states.requires_grad_()
    split = split_heads(states, group)
    back = gather_heads(split, group)
    (back * (1 + place.rank)).sum().backward()
    single = split_heads(states[:1], group)
    values = torch.arange(2.0).add(10 * place.rank).requires_grad_()
    gathered = gather_tokens(values, group)
    (gathered * torch.arange(4.0)).sum().backward()
    tensors: dict[str, Any] = {
        "split": split,
        "round trip": back - states,
        "gradient": states.grad,
        "repeated": single,
        "gathered": gathered,
        "own gradient": values.grad,
    }
    return {name: tensor.detach().squeeze(-1).tolist() for name, tensor in tensors.items()}


def test_exchange_of_heads_and_tokens():
    first, second = run_world(2, exchanged)
    assert first["split"] == [[0, 1, 2, 10, 11, 12]]
    assert second["split"] == [[100, 101, 102, 110, 111, 112]]
    assert first["round trip"] == second["round trip"] == [[0, 0, 0], [0, 0, 0]]
    # Each worker's gradient comes back to its own tokens, through both exchanges.
    assert first["gradient"] == [[1, 1, 1], [1, 1, 1]]
    assert second["gradient"] == [[2, 2, 2], [2, 2, 2]]
    # One head for two workers: both have it.
    assert first["repeated"] == second["repeated"] == [[0, 1, 2, 10, 11, 12]]
    assert first["gathered"] == second["gathered"] == [0, 1, 10, 11]
    assert first["own gradient"] == [0, 1] and second["own gradient"] == [2, 3]


def test_sequence_groups_need_packed_rows_and_divide_the_workers(configs: tuple[PPOConfig, SFTConfig]):
    model = configs[0].model
    with pytest.raises(ValueError, match=r"^model.ulysses_sequence_parallel_size=2: .*model.use_remove_padding=true"):
        replace(model, ulysses_sequence_parallel_size=2)
    shared = replace(model, ulysses_sequence_parallel_size=3, use_remove_padding=True)
    for config in configs:
        with pytest.raises(ValueError, match=r"^model.ulysses_sequence_parallel_size=3: must divide trainer.nnodes"):
            replace(config, model=shared)
