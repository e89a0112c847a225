"""The check that engines sample with the policy's weights, with mistakes that it must find."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.conftest import ROOT, changed
from tests.rollout.test_architectures import config_of
from tests.workers.groups import all_prompts, sample, start_group
from verl.batch.serialization import PackedWeight, digest, weight_buckets
from verl.cluster.failures import WorkerError
from verl.config import PPOConfig
from verl.config.common import LoraConfig
from verl.rollout.queue import EngineCapacity
from verl.rollout.requests import ResponseRequests
from verl.single_controller.generation import Generation
from verl.single_controller.roles import PolicyWorkers
from verl.trainer.ppo.weight_check import EXACT, ROUNDED, check_weights, tolerance_of

EMBEDDED = str(ROOT / "data" / "tiny_model")


def found(mistake: str, policy: PolicyWorkers, config: PPOConfig, prompts: list) -> bool:
    """Whether the check finds the mistake, which begins after a first sync without it."""
    policy.sync_weights(0)
    policy.workers.run("confuse", mistake)
    if "stale" in mistake:
        policy.sync_weights(0)
    try:
        check_weights(config, policy, prompts, 5)
    except WorkerError as error:
        assert str(error).startswith("engine 0 of rollout.name=vllm does not sample with the policy's weights: ")
        policy.workers.run("confuse", "")
        return True
    policy.workers.run("confuse", "")
    return False


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weight_check_finds_mistakes(dtype, small_config, tiny_tokenizer, ray_session):
    lora = LoraConfig(rank=4, alpha=8.0, target_modules=["all-linear"], dropout=0.0)
    config = changed(small_config, model={"path": EMBEDDED, "lora": lora}, rollout={"dtype": dtype})
    prompts = all_prompts(config, tiny_tokenizer)
    group = start_group(config, 1)
    try:
        policy = PolicyWorkers(group, config)
        before = group.run("parameters")[0]
        sampled = [sample(group, prompts, config.rollout.train_kwargs, 1)]
        assert not found("", policy, config, prompts)
        assert found("layers exchanged", policy, config, prompts)
        assert found("all stale", policy, config, prompts)
        if dtype == "float32":  # elsewhere, what a few weights change is within the rounding
            assert found("stale", policy, config, prompts)
            assert found("tied head", policy, config, prompts)
        # Training begins as if nothing had been checked.
        assert not found("", policy, config, prompts)
        sampled.append(sample(group, prompts, config.rollout.train_kwargs, 1, version=5))
        assert torch.equal(sampled[0].tokens, sampled[1].tokens)
        assert torch.equal(sampled[0].rollout_logprobs, sampled[1].rollout_logprobs)
        after = group.run("parameters")[0]
        assert all(torch.equal(before[name], after[name]) for name in before)
        with pytest.raises(WorkerError, match="^engine 0 holds version 5 of the weights, not 4: "):
            sample(group, prompts, config.rollout.train_kwargs, 1, version=4)
    finally:
        group.close()


@pytest.mark.slow
def test_weight_check_finds_experts_in_wrong_places(small_config, tiny_tokenizer, tmp_path: Path, ray_session):
    config = config_of("qwen3_moe", tmp_path, small_config, tiny_tokenizer)
    prompts, group = all_prompts(config, tiny_tokenizer), start_group(config, 1)
    try:
        policy = PolicyWorkers(group, config)
        assert not found("", policy, config, prompts)
        assert found("experts rolled", policy, config, prompts)
    finally:
        group.close()


def test_precision_decides_the_tolerance(small_config):
    assert tolerance_of(small_config, "cpu") == EXACT
    for change in ({"rollout": {"dtype": "bfloat16"}}, {"model": {"param_dtype": "bfloat16"}}):
        assert tolerance_of(changed(small_config, **change), "cpu") == ROUNDED
    for change in ({"top_p": 0.9}, {"repetition_penalty": 1.1}, {"engine_kwargs": {"quantization": "fp8"}}):
        assert tolerance_of(changed(small_config, rollout=change), "cpu") is None


def test_generation_refuses_engines_with_other_weights(small_config):
    engines = SimpleNamespace(run_living=lambda method: [EngineCapacity(4, 4, version) for version in (3, 0)])
    requests = ResponseRequests([], [], [], small_config.rollout.train_kwargs)
    with pytest.raises(WorkerError, match="^engine 1 holds version 0 of the weights, not 3: "):
        Generation(engines, 1, requests, True, lambda part: None, version=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_damaged_weight_is_named(dtype):
    value = torch.randint(0, 100, (3, 7001)).to(dtype)
    packed = PackedWeight.of("head.weight", value, 4)
    assert torch.equal(packed.restore(), value)
    assert packed.digest == digest(value) == digest(torch.cat([value[:1], value])[1:])
    values = packed.values.copy()
    values[20_000] ^= 1
    for wrong in (values, packed.values[::-1].copy()):
        with pytest.raises(RuntimeError, match=r"^head.weight \[3, 7001\] of version 4 was damaged on its way$"):
            packed._replace(values=wrong).restore()
    assert [w.version for bucket in weight_buckets([("a", value), ("b", value)], 1, 7) for w in bucket] == [7, 7]
