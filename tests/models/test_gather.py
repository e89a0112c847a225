"""Whole parameters in buckets: the bits of one parameter at a time, in few collectives. Real FSDP2 over gloo."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.models import sharding_cases as cases
from tests.models.worlds import World, world
from verl.config.common import LoraConfig, ModelConfig

pytestmark = pytest.mark.slow

LORA = LoraConfig(rank=3, alpha=4.0, target_modules=["q_proj", "down_proj"], dropout=0.0)


@pytest.fixture(scope="module")
def by_size(worlds: dict[int, World]) -> Iterator[dict[int, World]]:
    with world(3) as three:
        yield {**worlds, 3: three}


@pytest.mark.parametrize(("size", "fsdp_size"), [(1, -1), (2, -1), (3, -1), (4, -1), (4, 2), (4, 1)])
def test_odd_shapes_have_the_bits_of_the_whole_tensors(by_size, size, fsdp_size):
    # In rows and shapes that no number of ranks divides, one parameter larger than a bucket, two precisions.
    shards = size if fsdp_size == -1 else fsdp_size
    for bucket_bytes, messages in ((0, 6), (300, 2 if shards == 2 else 3), (1 << 20, 1)):
        for count, same in by_size[size].run(cases.odd_shapes_gathered, fsdp_size, bucket_bytes):
            assert same == [True] * 6
            assert count == (0 if shards == 1 else messages)


@pytest.mark.parametrize(("size", "fsdp_size"), [(1, -1), (3, -1), (4, 2)])
def test_a_policy_arrives_as_it_would_one_parameter_at_a_time(by_size, model_config: ModelConfig, size, fsdp_size):
    config = replace(model_config, fsdp=replace(model_config.fsdp, fsdp_size=fsdp_size))
    # 50 parameters; adapters of two layers in each of four blocks have two factors each.
    for lora, parameters in ((config.lora, 50), (LORA, 66)):
        for found in by_size[size].run(cases.policy_gathered, replace(config, lora=lora), 4 << 20):
            assert found.pop("same") and found.pop("order")
            assert found["before"] == parameters or size == 1
            assert found["after"] == (0 if size == 1 else 1)


def test_a_reference_has_the_policys_weights_without_a_file(by_size, model_config: ModelConfig):
    assert all(by_size[2].run(cases.copied_from_a_policy, model_config))


def test_what_does_not_learn_is_held_as_it_is_computed_with(by_size, model_config: ModelConfig):
    for found in by_size[2].run(cases.frozen, replace(model_config, param_dtype="bfloat16")):
        assert found["same"]
        assert found["learns"] == found["adapters"] == {torch.float32}
        assert found["rests"] == found["base"] == {torch.bfloat16}
