"""Sequences shared by several workers, and rows without padding: every model over real FSDP2 and gloo."""

from dataclasses import replace

import pytest
import torch
import transformers

from tests.kit import TINY, ppo_config, save_random_model
from tests.models.models_in_worlds import Learned, every_model
from tests.workers.groups import relative_difference
from verl.batch import Batch
from verl.config import PPOConfig, SFTConfig, load_config


@pytest.fixture(scope="module")
def configs(tiny_tokenizer, tmp_path_factory: pytest.TempPathFactory) -> tuple[PPOConfig, SFTConfig]:
    """With random models whose two key and value heads serve four query heads."""
    models = tmp_path_factory.mktemp("models")
    changes = {"vocab_size": len(tiny_tokenizer), "pad_token_id": tiny_tokenizer.pad_token_id, "num_hidden_layers": 2}
    config = transformers.Qwen2Config(**TINY | changes, tie_word_embeddings=True, num_labels=1)
    for name, kind in (
        ("policy", transformers.AutoModelForCausalLM),
        ("critic", transformers.AutoModelForTokenClassification),
        ("judge", transformers.AutoModelForSequenceClassification),
    ):
        save_random_model(config, models / name, kind)
        tiny_tokenizer.save_pretrained(models / name)
    overrides = f"""
        model.path={models}/policy critic.model.path={models}/critic reward_model.model.path={models}/judge
        reward_model.enable=true reward_model.micro_batch_size_per_gpu=3 algorithm.adv_estimator=gae
        critic.micro_batch_size_per_gpu=3 actor.micro_batch_size_per_gpu=3 actor.log_prob_micro_batch_size_per_gpu=3
        actor.entropy_coeff=0.05 actor.use_kl_loss=true model.logits_chunk_size=4
    """
    lessons = [f"model.path={models}/policy", "data.micro_batch_size_per_gpu=3", "trainer.n_gpus_per_node=4"]
    return ppo_config(overrides), load_config(SFTConfig, "sft", lessons)


@pytest.fixture(scope="module")
def alone(worlds, configs: tuple[PPOConfig, SFTConfig]) -> tuple[Batch, dict[str, Learned]]:
    """One worker, rows padded, the head at once."""
    whole = {"use_remove_padding": False, "logits_chunk_size": 0}
    return worlds[1].run(every_model, *configs, whole, {}, IN_ORDER)[0]


IN_ORDER, MIXED = list(range(8)), [5, 2, 7, 0, 4, 6, 3, 1]
WHOLE, PACKED = ({"use_remove_padding": True, "share_prompts": share} for share in (False, True))
SHARED_BY_2, SHARED_BY_4 = (PACKED | {"ulysses_sequence_parallel_size": size} for size in (2, 4))
BY_TOKENS = {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 30}
LAYOUTS = {
    "1 worker, all rows at once": (1, {}, {"micro_batch_size_per_gpu": 64}, IN_ORDER),
    "2 workers, micro-batches by tokens": (2, {}, BY_TOKENS, IN_ORDER),
    "2 workers, another order": (2, {}, BY_TOKENS, MIXED),
    "1 worker, packed, prompts with each row": (1, WHOLE, {}, IN_ORDER),
    "1 worker, packed, prompts once": (1, PACKED, {"micro_batch_size_per_gpu": 64}, IN_ORDER),
    "1 worker, packed, prompts once, another order": (1, PACKED, {}, MIXED),
    "2 workers to a sequence": (2, SHARED_BY_2, {}, IN_ORDER),
    "2 groups of 2, another order": (4, SHARED_BY_2, {}, MIXED),
    # More than there are heads of keys and values.
    "4 workers to a sequence": (4, SHARED_BY_4, {}, IN_ORDER),
}
"""Name -> workers, changes of all models' options, how actor and critic cut micro-batches, and the order of rows."""


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_model_learns_the_same_in_every_layout(name: str, worlds, configs, alone):
    world_size, changes, batching, order = LAYOUTS[name]
    sequence = changes.get("ulysses_sequence_parallel_size", 1)
    workers = worlds[world_size].run(every_model, *configs, changes, batching, order)
    expected, learned = alone[0][order], alone[1]
    for first in range(sequence):
        # All workers of a group know the results of its rows.
        found = Batch.join([rows for rows, _ in workers[first::sequence]])
        assert found.response_lengths.equal(expected.response_lengths) and len(found.names) == 8
        for column in found.names:
            assert getattr(expected, column).std() > 0.05, column
            torch.testing.assert_close(getattr(found, column), getattr(expected, column), atol=1e-5, rtol=0)
    for learner, (metrics, gradients) in learned.items():
        for _, results in workers:
            assert results[learner][0] == pytest.approx(metrics, abs=1e-5, rel=1e-5)
            assert relative_difference(gradients, results[learner][1]) < 1e-5, learner


def test_sequence_groups_divide_the_workers(configs, refused):
    shared = replace(configs[0].model, ulysses_sequence_parallel_size=3, use_remove_padding=True)
    for config in configs:
        with refused("model.ulysses_sequence_parallel_size=3: must divide trainer.nnodes..."):
            replace(config, model=shared)
