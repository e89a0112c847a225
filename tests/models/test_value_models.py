"""Critic and reward model against transformers; test_sequence_parallel.py compares workers and micro-batches."""

import shutil
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import distribute_tensor
from transformers import AutoModelForSequenceClassification, GPT2Config

from tests.kit import changed
from tests.models.models_in_worlds import example
from verl.batch import Batch
from verl.models.checks import check_value_architecture
from verl.models.loading import load_sharded_value_model
from verl.models.tokenizer import reward_model_batch
from verl.workers.critic import Critic, RewardModel, scored_positions


def value_batch(batch: Batch, values: torch.Tensor) -> Batch:
    torch.manual_seed(0)
    learned = torch.ones_like(values, dtype=torch.bool)
    return batch.columns("tokens").fill(learn_mask=learned, values=values, returns=torch.randn(values.shape))


def test_new_value_head_starts_at_zero_and_learns(small_config, tiny_model, single_mesh):
    # The random body is touchy: its last norm blows small changes up.
    critic = Critic(changed(small_config.critic, optim={"lr": 1e-5}, micro_batch_size_per_gpu=5), single_mesh, 10)
    episodes = example()
    assert (critic.compute_values(episodes).values == 0).all()

    weight = critic.model.score.weight
    head = 0.05 * torch.randn(weight.shape[1], generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        weight.copy_(distribute_tensor(head[None], weight.device_mesh, weight.placements))
    found = critic.compute_values(episodes)
    assert found.values.abs().min() > 0
    # A token's value is what the state before it gives.
    model = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1).eval()
    one = episodes[[3]]
    with torch.no_grad():
        states = model.base_model(one.tokens[None]).last_hidden_state[0]
    torch.testing.assert_close(found[[3]].values, states[one.predictors] @ head, atol=1e-4, rtol=0)

    # One update per call: the loss on the same targets falls.
    batch, num_tokens = value_batch(episodes, found.values), len(found.values)
    losses = [critic.update(batch, num_tokens)["critic/vf_loss"] for _ in range(5)]
    assert min(losses) < 0.9 * losses[0]


def test_reward_model_scores_match_sequence_classification(small_config, reward_model, tiny_tokenizer, single_mesh):
    options = changed(small_config.reward_model, model={"path": str(reward_model)}, micro_batch_size_per_gpu=3)
    texts = ["3", "the answer is 12345", "", "7" * 30, "no"]
    chats = [[{"role": "user", "content": f"{i} + {7 * i} = ?"}] for i in range(len(texts))]
    batch, _ = reward_model_batch(chats, texts, tiny_tokenizer, max_length=64)
    scores = RewardModel(options, single_mesh).compute_scores(batch).scores
    model = AutoModelForSequenceClassification.from_pretrained(reward_model).eval()
    for score, text in zip(scores, batch.split(1), strict=True):
        with torch.no_grad():
            expected = model(text.tokens[None]).logits[0, 0]
        assert abs(score - expected) < 1e-4
    assert scores.std() > 0.01


def test_scored_position_skips_padding():
    ids = torch.tensor([[5, 7, 9, 2], [5, 2, 2, 2], [2, 2, 2, 2], [5, 6, 2, 0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 0]])
    assert scored_positions(ids, mask, pad_token_id=2).tolist() == [[2], [0], [0], [1]]
    assert scored_positions(ids, mask, pad_token_id=None).tolist() == [[3], [2], [1], [2]]


def test_unfit_value_head_is_refused(tiny_model, reward_model, model_config, refused, tmp_path, single_mesh):
    def load(path: Path, new_head: bool) -> torch.nn.Module:
        config = replace(model_config, path=str(path))
        return load_sharded_value_model(config, single_mesh, trainable=new_head)

    two_labels, gated, torn = (tmp_path / name for name in ("two_labels", "gated", "torn"))
    AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=2).save_pretrained(two_labels)
    weights = load_file(reward_model / "model.safetensors")
    extended = weights | {"gate.weight": torch.ones(1)}
    del weights["model.norm.weight"]
    for path, tensors in ((gated, extended), (torn, weights)):
        shutil.copytree(reward_model, path)
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    for path, new_head, line in (
        (two_labels, False, "the reward model ...: has no head with one output; name a model..."),
        (tiny_model, False, "the reward model ...: has no head with one output; name a model..."),
        (gated, False, "the reward model ...: has further weights ['gate.weight']; name a model..."),
        (
            torn,
            True,
            "critic.model.path=...: its files lack weights of ...: model.norm.weight; name a complete model...",
        ),
    ):
        with refused(line):
            load(path, new_head)
    # A critic takes the body and a new head.
    assert not load(two_labels, True).score.weight.full_tensor().any()
    assert load(reward_model, True).score.weight.full_tensor().any()


def test_architecture_without_value_form_is_refused(model_config, refused, tmp_path):
    check_value_architecture(model_config, "critic.model.path")
    GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=16).save_pretrained(tmp_path)
    with refused("critic.model.path='TMP': ...no token classification form ... for gpt2; it has one for..."):
        check_value_architecture(replace(model_config, path=str(tmp_path)), "critic.model.path")
