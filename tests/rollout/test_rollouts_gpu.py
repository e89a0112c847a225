"""Rollout engines on a GPU: what sleeping gives back, and that waking goes on with the policy's weights."""

from dataclasses import replace

import pytest
import torch

from tests.rollout.test_rollouts import agree, generate, learn
from tests.workers.groups import all_prompts, start_group

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

KV_CACHE_MB = 2048

# Attention kernels of a GPU round differently, in TF32 where they may.
TOLERANCE = 2e-2


@pytest.mark.parametrize("name", ["vllm", "hf"])
def test_generating_and_learning_take_turns(name, ray_session, small_config, tiny_tokenizer):
    prompts = all_prompts(small_config, tiny_tokenizer)
    rollout_config = replace(
        small_config.rollout, name=name, dtype="float32", gpu_memory_utilization=0.3, kv_cache_memory_mb=KV_CACHE_MB
    )
    fast = replace(small_config.actor, optim=replace(small_config.actor.optim, lr=1e-3, lr_warmup_steps=0))
    group = start_group(replace(small_config, rollout=rollout_config, actor=fast), 1, "cuda")
    sampling = rollout_config.train_kwargs
    rollout = generate(group, prompts, sampling, 1)
    agree(group, rollout, TOLERANCE)

    (awake,) = group.run("free_gpu_memory")
    group.run("finish_generation")
    (asleep,) = group.run("free_gpu_memory")
    if name == "vllm":
        # All of the KV cache, but for what torch has taken in between.
        assert asleep - awake > 0.9 * (KV_CACHE_MB << 20)

    learn(group, rollout)
    # Without weights being given, as for validation by itself: the worker sees to it.
    agree(group, generate(group, prompts, sampling, 2), TOLERANCE)
    assert group.run("free_gpu_memory")[0] - awake < 0.1 * (KV_CACHE_MB << 20)

    group.run("finish_generation")
    learn(group, rollout)
    group.run("sync_weights")
    agree(group, generate(group, prompts, sampling, 3), TOLERANCE)
    group.close()
