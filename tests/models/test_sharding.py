"""How models are held, on real FSDP2 over gloo: sharding, gathering, offload, recomputation, adapters."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.models import sharding_cases as cases
from tests.models.test_huggingface import glm, mixtral
from tests.models.worlds import World
from tests.workers.groups import relative_difference
from verl.config.common import LoraConfig, ModelConfig
from verl.models.huggingface import one_by_one

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def two(worlds: dict[int, World]) -> World:
    return worlds[2]


@pytest.fixture(scope="module")
def plain(two: World, model_config: ModelConfig) -> cases.Outcome:
    """Two workers that hold one copy."""
    return two.run(cases.train, model_config)[0]


def sharded(config: ModelConfig, **fsdp: Any) -> ModelConfig:
    return replace(config, fsdp=replace(config.fsdp, **fsdp))


def assert_same(outcome: cases.Outcome, expected: cases.Outcome, tolerance: float) -> None:
    """Gradients, norms and losses of every step, and the weights afterwards."""
    close = {"atol": tolerance, "rtol": tolerance}
    torch.testing.assert_close(outcome.gradients, expected.gradients, **close)
    torch.testing.assert_close(outcome.weights, expected.weights, **close)
    assert outcome.norms == pytest.approx(expected.norms, rel=max(tolerance, 1e-15))
    assert outcome.losses == pytest.approx(expected.losses, rel=max(tolerance, 1e-15))


def test_clipped_sharded_gradients_match_one_process(plain, tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    (-cases.logprobs(model, cases.batch()).sum() / cases.batch().numel()).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cases.OPTIM.grad_clip)
    assert plain.norms[0] == pytest.approx(norm.item(), rel=1e-5) and norm > 10 * cases.OPTIM.grad_clip
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    torch.testing.assert_close(plain.gradients[0], expected, atol=1e-6, rtol=1e-5)
    assert plain.losses[1] < plain.losses[0]


def test_hybrid_sharding_changes_no_gradient(two, worlds, model_config, plain):
    assert worlds[4].run(cases.mesh_layouts)[0] == [[[0], [1], [2], [3]], [[0, 1], [2, 3]]]
    assert worlds[4].run(cases.time_limits)[0] == [300, 300]
    for group, size in ((two, 1), (worlds[4], 2), (worlds[4], -1)):
        # Sums in another order: up to 1.06e-6 apart, by the processor's instructions.
        assert_same(group.run(cases.train, sharded(model_config, fsdp_size=size))[0], plain, 2e-6)


def test_all_ranks_have_the_weights_that_one_reads(two, model_config, tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    built, weights, buffers, sizes = zip(*two.run(cases.loaded, model_config), strict=True)
    assert built == (["meta"], ["meta"]) and buffers[0]
    for of_model, expected in ((weights, model.named_parameters()), (buffers, model.named_buffers())):
        torch.testing.assert_close(of_model, (dict(expected),) * 2, atol=0, rtol=0)
    assert [sum(column) for column in zip(*sizes, strict=True)] == [p.numel() for p in model.parameters()]
    assert all(0.4 < sum(held) / model.num_parameters() < 0.6 for held in sizes)


def test_weights_are_streamed_one_at_a_time(two, model_config, tmp_path):
    for lora in (model_config.lora, LoraConfig(rank=2, alpha=4.0, target_modules=["all-linear"], dropout=0.0)):
        most, given = two.run(cases.streamed, replace(model_config, lora=lora))[0]
        assert most == 1 and len(given) == 50
    models = {
        # transformers joins these three times three matrices of a layer to two, and calls the layer's part mlp.
        "block_sparse_moe.experts.2.w3.weight": mixtral(),
        "mlp.gate.e_score_correction_bias": glm().float(),
    }
    for name, model in models.items():
        folder = tmp_path / type(model).__name__
        model.save_pretrained(folder)
        expected = load_file(folder / "model.safetensors")
        assert f"model.layers.1.{name}" in expected
        for most, given in two.run(cases.streamed, replace(model_config, path=str(folder))):
            # The three matrices of a layer's experts are stacked for an engine, gate and up views of one parameter.
            assert most <= 2 and sum("*" in part for part in given) == (6 if "sparse" in name else 3)
            found = dict(one for pair in given.items() for one in one_by_one(*pair))
            torch.testing.assert_close(found, expected, atol=0, rtol=0)


@pytest.mark.nightly
@pytest.mark.parametrize("rank", [0, 4])
def test_loading_needs_little_more_than_the_shards(two, model_config, tmp_path, rank: int):
    sizes = {"hidden_size": 512, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"num_hidden_layers": 12, "vocab_size": 64, "num_experts": 32, "moe_intermediate_size": 256}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes)).to(torch.bfloat16)
    assert sum(p.nbytes for p in model.parameters()) > 300e6
    model.save_pretrained(tmp_path, max_shard_size="50MB")
    config = replace(model_config, path=str(tmp_path), lora=replace(model_config.lora, rank=rank))
    for peak, shards in two.run(cases.loading_peak, sharded(config, fsdp_size=-1)):
        # 600 MB in float32, half of it on each rank; the largest parameter, experts of a layer, has 34.
        assert shards > 300e6 and peak < shards + 150e6


@pytest.mark.parametrize("size", [-1, 1])
def test_offloading_moves_everything_and_changes_no_bit(two, model_config, size: int):
    stays = sharded(model_config, fsdp_size=size)
    moves = sharded(stays, param_offload=True, optimizer_offload=True)
    for found in two.run(cases.offloaded, moves):
        errors = found.pop("errors")
        assert len(errors) == 2 and all("offloaded to the host's memory" in error for error in errors)
        assert found.pop("moments") == 100 and found.pop("gradients") == 0
        assert all(found.values()), found
    assert_same(two.run(cases.train, moves)[0], two.run(cases.train, stays)[0], 0)
    # A model that never changes.
    assert all(all(rank) for rank in two.run(cases.constant_offload, stays))


@pytest.mark.parametrize("values", [False, True])
def test_checkpointing_keeps_fewer_activations_and_the_gradient(two, model_config, values: bool):
    for variant in (model_config, replace(model_config, param_dtype="bfloat16")):
        keeps = two.run(cases.train, variant, values)[0]
        recomputes = two.run(cases.train, replace(variant, gradient_checkpointing=True), values)[0]
        assert_same(recomputes, keeps, 1e-6)
        assert 0 < recomputes.saved_bytes < 0.5 * keeps.saved_bytes


def test_nonfinite_update_of_one_rank_is_skipped_on_all(two, model_config):
    (plain, weights), (figures, after) = two.run(cases.skipped, model_config)[0]
    assert [update["skipped_updates"] for update in plain] == [0, 0]
    assert [update["skipped_updates"] for update in figures] == [0, 1, 0]
    assert math.isnan(figures[1]["grad_norm"]) and figures[2]["grad_norm"] == plain[1]["grad_norm"]
    for name, value in weights.items():
        assert torch.equal(value, after[name]), name


def test_bfloat16_products_with_float32_weights_and_sums(two, model_config, plain):
    outcome = two.run(cases.train, replace(model_config, param_dtype="bfloat16"), steps=8)[0]
    assert {g.dtype for g in outcome.gradients[0].values()} == {torch.float32}
    assert {w.dtype for w in outcome.weights.values()} == {torch.float32}
    assert outcome.losses[-1] < outcome.losses[0] - 0.1
    # So do the parts outside the layers, in each micro-batch.
    parts = ["model.embed_tokens", "model.norm", "lm_head"]
    computed = two.run(cases.computed_in, replace(model_config, param_dtype="bfloat16"), parts)[0]
    assert computed == [torch.bfloat16] * 6
    # A sum over ranks in bfloat16 could not have more digits than bfloat16.
    once = two.run(cases.train, replace(model_config, param_dtype="bfloat16"), steps=1, num_micro=1, clip=1e9)[0]
    gradient = torch.cat([g.flatten() for g in once.gradients[0].values()])
    assert (gradient != gradient.bfloat16().float()).float().mean() > 0.5
    assert 0 < relative_difference(plain.gradients[0], outcome.gradients[0]) < 0.05


LORA = LoraConfig(rank=4, alpha=8.0, target_modules=["q_proj", "down_proj"], dropout=0.0)


@pytest.mark.parametrize("values", [False, True])
def test_adapters_learn_and_are_exported_merged_and_alone(two, model_config, tmp_path, values: bool):
    # Dropout is for updates alone: scores are those of the merged model, again and again.
    lora = replace(LORA, dropout=0.5)
    found = two.run(cases.adapters, replace(model_config, lora=lora, gradient_checkpointing=True), values, tmp_path)
    one, other = found
    head = ["score.bias", "score.weight"] if values else []
    assert one["trained"] == one["moved"] == one["trained after"]
    assert [name for name in one["trained"] if "lora_" not in name] == head
    # Four layers, two projections each, two factors each.
    assert len(one["trained"]) == 16 + len(head)
    torch.testing.assert_close(one["drawn"], other["drawn"], atol=0, rtol=0)
    assert all(value.any() == ("lora_A" in name) for name, value in one["drawn"].items())
    assert (one["learned"] - one["first"]).abs().max() > 1e-2
    assert torch.equal(one["enabled again"], one["learned"])
    if not values:
        assert torch.equal(one["disabled"], one["first"])
    for name in ("merged", "peft"):
        torch.testing.assert_close(one[name], one["learned"], atol=1e-5, rtol=0)


def test_adapters_with_offload_and_checkpointing(two, worlds, model_config):
    lora = replace(model_config, lora=LORA)
    expected = two.run(cases.train, lora)[0]
    frugal = sharded(
        replace(lora, gradient_checkpointing=True), fsdp_size=2, param_offload=True, optimizer_offload=True
    )
    for group in (two, worlds[4]):
        assert_same(group.run(cases.train, frugal)[0], expected, 1e-6)
    assert all(".lora_" in name for name in expected.gradients[0])


def test_adapter_dropout_acts_in_updates_alone(two, model_config):
    lora = replace(model_config, lora=replace(LORA, dropout=0.5))
    plain, dropped = (two.run(cases.train, config)[0] for config in (replace(lora, lora=LORA), lora))
    # Adapters start at 0, so the first loss is the same; its gradient is not.
    assert dropped.losses[0] == pytest.approx(plain.losses[0], rel=1e-6)
    assert relative_difference(plain.gradients[0], dropped.gradients[0]) > 0.1
    # The same run again, and what the backward pass computes again, drop the same.
    assert_same(two.run(cases.train, lora)[0], dropped, 1e-6)
    assert_same(two.run(cases.train, replace(lora, gradient_checkpointing=True))[0], dropped, 1e-6)


@pytest.mark.parametrize(("size", "fsdp_size"), [(1, -1), (2, -1), (4, -1), (4, 2), (4, 1)])
def test_gathered_odd_shapes_have_the_bits_of_the_whole(worlds, size, fsdp_size):
    # In rows and shapes that no number of ranks divides, one parameter larger than a bucket, two precisions.
    shards = size if fsdp_size == -1 else fsdp_size
    for bucket_bytes, messages in ((0, 6), (300, 2 if shards == 2 else 3), (1 << 20, 1)):
        for count, same in worlds[size].run(cases.odd_shapes_gathered, fsdp_size, bucket_bytes):
            assert same == [True] * 6
            assert count == (0 if shards == 1 else messages)


def test_reference_copies_the_weights_of_the_policy(two, model_config: ModelConfig):
    assert all(two.run(cases.copied_from_a_policy, model_config))


def test_frozen_model_is_held_in_its_compute_dtype(two, model_config: ModelConfig):
    for found in two.run(cases.frozen, replace(model_config, param_dtype="bfloat16")):
        assert found["same"]
        assert found["learns"] == found["adapters"] == {torch.float32}
        assert found["rests"] == found["base"] == {torch.bfloat16}
