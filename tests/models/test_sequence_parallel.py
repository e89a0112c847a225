"""Sequences shared by several workers, and rows without padding: every model over real FSDP2 and gloo."""

from dataclasses import replace

import pytest
import torch
import transformers

from tests.models.conftest import TINY
from tests.models.models_in_worlds import Results, every_model
from tests.workers.groups import relative_difference
from verl.config import PPOConfig, SFTConfig, load_config


@pytest.fixture(scope="module")
def configs(tiny_tokenizer, tmp_path_factory: pytest.TempPathFactory) -> tuple[PPOConfig, SFTConfig]:
    """With random models whose two key and value heads serve four query heads."""
    models = tmp_path_factory.mktemp("models")
    changes = {"vocab_size": len(tiny_tokenizer), "pad_token_id": tiny_tokenizer.pad_token_id, "num_hidden_layers": 2}
    config = transformers.Qwen2Config(**TINY | changes, tie_word_embeddings=True, num_labels=1)
    torch.manual_seed(0)
    for name, kind in (
        ("policy", transformers.AutoModelForCausalLM),
        ("critic", transformers.AutoModelForTokenClassification),
        ("judge", transformers.AutoModelForSequenceClassification),
    ):
        kind.from_config(config).save_pretrained(models / name)
        tiny_tokenizer.save_pretrained(models / name)
    overrides = f"""
        model.path={models}/policy critic.model.path={models}/critic reward_model.model.path={models}/judge
        reward_model.enable=true reward_model.micro_batch_size_per_gpu=3 algorithm.adv_estimator=gae
        critic.micro_batch_size_per_gpu=3 actor.micro_batch_size_per_gpu=3 actor.log_prob_micro_batch_size_per_gpu=3
        actor.entropy_coeff=0.05 actor.use_kl_loss=true model.logits_chunk_size=4
    """.split()
    lessons = [f"model.path={models}/policy", "data.micro_batch_size_per_gpu=3", "trainer.n_gpus_per_node=4"]
    return load_config(PPOConfig, "ppo_trainer", overrides), load_config(SFTConfig, "sft", lessons)


@pytest.fixture(scope="module")
def alone(worlds, configs: tuple[PPOConfig, SFTConfig]) -> Results:
    """One worker, rows padded, the head at once."""
    return worlds[1].run(every_model, *configs, {"use_remove_padding": False, "logits_chunk_size": 0}, {})[0]


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
    assert found[0] == pytest.approx(expected[0], abs=1e-5, rel=1e-5)
    assert relative_difference(expected[1], found[1]) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_model_learns_the_same_in_every_layout(name: str, worlds, configs, alone: Results):
    world_size, changes, batching = LAYOUTS[name]
    sequence = changes.get("ulysses_sequence_parallel_size", 1)
    workers = worlds[world_size].run(every_model, *configs, changes, batching)
    for quantity in ("logprobs", "entropy", "norms", "mean states", "values", "scores", "evaluation"):
        assert alone[quantity].std() > 0.05, quantity
        for first in range(sequence):
            # All workers of a group know the results of its rows.
            found = torch.cat([results[quantity] for results in workers[first::sequence]])
            torch.testing.assert_close(found, alone[quantity], atol=1e-5, rtol=0)
    for learner in ("actor", "critic", "sft"):
        for results in workers:
            assert_same_learning(results[learner], alone[learner])


def test_sequence_groups_need_packed_rows_and_divide_the_workers(configs: tuple[PPOConfig, SFTConfig]):
    model = configs[0].model
    with pytest.raises(ValueError, match=r"^ulysses_sequence_parallel_size=2: .*model.use_remove_padding=true"):
        replace(model, ulysses_sequence_parallel_size=2, use_remove_padding=False)
    shared = replace(model, ulysses_sequence_parallel_size=3, use_remove_padding=True)
    for config in configs:
        with pytest.raises(ValueError, match=r"^model.ulysses_sequence_parallel_size=3: must divide trainer.nnodes"):
            replace(config, model=shared)
