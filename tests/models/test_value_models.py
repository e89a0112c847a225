"""Critic and reward model on real FSDP2 over gloo, against transformers in one process."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import AutoModelForSequenceClassification, AutoTokenizer, GPT2Config

from tests.workers.groups import all_prompts, relative_difference, start_group
from verl.config import PPOConfig, load_config
from verl.config.common import ModelConfig
from verl.data.prompts import PromptSample
from verl.data.reward_model_inputs import judged_texts
from verl.models.fsdp import check_value_architecture, load_sharded_value_model
from verl.protocol import RolloutBatch, ValueBatch
from verl.single_controller import WorkerGroup, concat
from verl.single_controller.roles import RoleWorkers
from verl.workers.reward_model import scored_positions


@pytest.fixture(scope="module")
def reward_model(tiny_model: Path, tmp_path_factory) -> Path:
    """A sequence classification model of the tiny one's body and a random head."""
    folder = tmp_path_factory.mktemp("reward_model")
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1)
    with torch.no_grad():
        model.score.weight.normal_()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def config(small_config: PPOConfig, reward_model: Path) -> PPOConfig:
    judge = replace(
        small_config.reward_model,
        enable=True,
        model=replace(small_config.reward_model.model, path=str(reward_model)),
        micro_batch_size_per_gpu=3,
    )
    gae = replace(small_config.algorithm, adv_estimator="gae")
    # The random body is touchy: its last norm blows small changes up.
    critic = replace(small_config.critic, optim=replace(small_config.critic.optim, lr=1e-5))
    calculator = replace(small_config.calculator, source="actor")
    # Starts faster than vLLM.
    rollout = replace(small_config.rollout, name="hf")
    return replace(
        small_config, algorithm=gae, critic=critic, reward_model=judge, calculator=calculator, rollout=rollout
    )


@pytest.fixture(scope="module")
def one(config: PPOConfig, ray_session: None) -> Iterator[WorkerGroup]:
    group = start_group(config, 1)
    yield group
    group.close()


@pytest.fixture(scope="module")
def two(config: PPOConfig, ray_session: None) -> Iterator[WorkerGroup]:
    group = start_group(config, 2)
    yield group
    group.close()


@pytest.fixture(scope="module")
def prompts(config: PPOConfig, tiny_tokenizer) -> PromptSample:
    return all_prompts(config, tiny_tokenizer)


@pytest.fixture(scope="module")
def rollout(one: WorkerGroup, prompts: PromptSample, config: PPOConfig) -> RolloutBatch:
    return concat(one.run_split("generate", prompts.tokens, config.rollout.train_kwargs, 1))


@pytest.fixture(scope="module")
def head(tiny_model: Path) -> torch.Tensor:
    width = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1).config.hidden_size
    return 0.05 * torch.randn(width, generator=torch.Generator().manual_seed(0))


def value_batch(rollout: RolloutBatch, values: torch.Tensor) -> ValueBatch:
    torch.manual_seed(0)
    returns = torch.randn(values.shape) * rollout.response_mask
    return ValueBatch(
        rollout.input_ids,
        rollout.attention_mask,
        rollout.response_mask,
        values,
        returns,
        batch_size=[len(rollout)],
    )


def test_a_new_value_head_knows_nothing_and_learns(one, two, rollout, head, config, tiny_model):
    mask = rollout.response_mask.bool()
    before = concat(two.run_split("compute_values", rollout))
    assert (before == 0).all()

    for group in (one, two):
        group.run("configure_critic", {"micro_batch_size_per_gpu": 5}, head)
    values = concat(one.run_split("compute_values", rollout))
    torch.testing.assert_close(values, concat(two.run_split("compute_values", rollout)), atol=1e-5, rtol=0)
    assert (values[~mask] == 0).all() and values[mask].abs().min() > 0
    # Column t is what the state before token t gives.
    model = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1).eval()
    row, num_prompt = 3, rollout.input_ids.shape[1] - mask.shape[1]
    keep = rollout.attention_mask[row].bool()
    with torch.no_grad():
        states = model.base_model(rollout.input_ids[row][keep][None]).last_hidden_state[0]
    start, length = int(keep[:num_prompt].sum()) - 1, int(mask[row].sum())
    torch.testing.assert_close(values[row, :length], states[start : start + length] @ head, atol=1e-4, rtol=0)

    batch, num_tokens = value_batch(rollout, values), int(mask.sum())
    gradients = []
    for group, rows, max_tokens in ((one, 64, None), (one, 3, None), (two, 64, None), (two, 5, None), (two, 1, 90)):
        changes = {"micro_batch_size_per_gpu": rows, "use_dynamic_bsz": max_tokens is not None}
        changes["ppo_max_token_len_per_gpu"] = max_tokens or 1
        group.run("configure_critic", changes, head)
        balance = max_tokens is not None
        found = RoleWorkers(group, balance=balance).map_rows("compute_values", rollout)
        torch.testing.assert_close(found, values, atol=1e-5, rtol=0)
        gradients.append(RoleWorkers(group, balance=balance).run_update("critic_gradients", batch, num_tokens))
    for other in gradients[1:]:
        assert relative_difference(gradients[0], other) < 1e-5

    # One update per call: the loss on the same targets falls.
    losses = [two.run_split("update_critic", batch, num_tokens)[0]["critic/vf_loss"] for _ in range(5)]
    assert min(losses) < 0.9 * losses[0]


def test_an_engine_need_not_return_states(one, rollout, prompts, config):
    assert not rollout.rank_metrics.metric_names
    assert rollout.rank_metrics.mean_states.shape == (len(rollout), 0, 0)
    metrics = concat(one.run_split("compute_logprobs", rollout)).rank_metrics
    assert metrics.metric_names == config.calculator.metric_names
    assert metrics.by_name["Effective Rank"].shape == metrics.mean_states.shape[:2] == (len(rollout), 2)


def test_reward_model_scores_are_those_of_sequence_classification(one, two, prompts, reward_model, tiny_tokenizer):
    chats = [record.messages for record in prompts.records[:5]]
    texts = ["3", "the answer is 12345", "", "7" * 30, "no"]
    batch, _ = judged_texts(chats, texts, tiny_tokenizer, max_length=64)
    scores = concat(two.run_split("compute_rm_scores", batch))
    torch.testing.assert_close(scores, concat(one.run_split("compute_rm_scores", batch)), atol=1e-5, rtol=0)
    model = AutoModelForSequenceClassification.from_pretrained(reward_model).eval()
    for score, ids, mask in zip(scores, batch.input_ids, batch.attention_mask, strict=True):
        with torch.no_grad():
            expected = model(ids[mask.bool()][None]).logits[0, 0]
        assert abs(score - expected) < 1e-4
    assert scores.std() > 0.01


def test_the_token_that_also_pads_is_not_read():
    ids = torch.tensor([[5, 7, 9, 2], [5, 2, 2, 2], [2, 2, 2, 2], [5, 6, 2, 0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 0]])
    assert scored_positions(ids, mask, pad_token_id=2).tolist() == [[2], [0], [0], [1]]
    assert scored_positions(ids, mask, pad_token_id=None).tolist() == [[3], [2], [1], [2]]


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    """A world of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    dist.destroy_process_group()


def model_config(path: Path) -> ModelConfig:
    return replace(load_config(PPOConfig, "ppo_trainer").model, path=str(path))


def load(path: Path, new_head: bool, mesh: DeviceMesh) -> torch.nn.Module:
    return load_sharded_value_model(model_config(path), mesh, trainable=new_head, new_head=new_head)


def test_heads_that_do_not_fit(tiny_model, reward_model, tmp_path, mesh):
    two_labels, gated = tmp_path / "two_labels", tmp_path / "gated"
    AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=2).save_pretrained(two_labels)
    shutil.copytree(reward_model, gated)
    save_file(
        load_file(gated / "model.safetensors") | {"gate.weight": torch.ones(1)},
        gated / "model.safetensors",
        metadata={"format": "pt"},
    )
    for path, message in (
        (two_labels, "holds no head with one output"),
        (tiny_model, "holds no head with one output"),
        (gated, r"has \['gate.weight'\] besides"),
    ):
        with pytest.raises(ValueError, match=message):
            load(path, False, mesh)
    # A critic takes the body and a new head.
    assert not load(two_labels, True, mesh).score.weight.full_tensor().any()
    assert load(reward_model, True, mesh).score.weight.full_tensor().any()


def test_architectures_without_a_score_head_are_named(tiny_model, tmp_path):
    check_value_architecture(model_config(tiny_model), "critic.model.path")
    GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=16).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"^critic.model.path=.*no token classification form .* for gpt2; it has for"):
        check_value_architecture(model_config(tmp_path), "critic.model.path")
