"""Every architecture that docs/models.md lists: sampled, measured, trained and synced, on tiny random models."""

from pathlib import Path

import pytest

from tests.conftest import changed
from tests.rollout.test_rollouts import FAST, agree, assert_measured, generate, learn
from tests.vllm_patches import zoo
from tests.workers.groups import all_prompts, start_group
from verl.config import ConfigError, PPOConfig

IN_EVERY_ROUND = ["qwen3_moe"]
"""One beside the embedded model, which is a Qwen2."""

CASES = [pytest.param(n, marks=() if n in IN_EVERY_ROUND else pytest.mark.nightly) for n in zoo.ARCHITECTURES]


def config_of(name: str, folder: Path, small_config: PPOConfig, tokenizer) -> PPOConfig:
    """The small config for a model of the zoo, with the tiny model's tokenizer."""
    path = zoo.build(name, folder / name, vocab_size=264)
    tokenizer.save_pretrained(path)
    # Eager attention has the soft caps and sinks that some need.
    model = {"path": str(path), "attn_implementation": "eager", "param_dtype": "float32"}
    layers = [-1] if name in zoo.WITHOUT_INTERMEDIATE_LAYERS else [0, -1]
    rollout = {"name": "hf" if name in zoo.WITHOUT_NATIVE_CLASS | zoo.WITHOUT_WEIGHT_SYNC else "vllm"}
    return changed(small_config, model=model, actor=FAST, calculator={"layers": layers}, rollout=rollout)


@pytest.mark.parametrize("name", CASES)
def test_an_architecture_is_sampled_measured_trained_and_synced(
    name, small_config, tiny_tokenizer, tmp_path, ray_session
):
    config = config_of(name, tmp_path, small_config, tiny_tokenizer)
    prompts, sampling = all_prompts(config, tiny_tokenizer), config.rollout.train_kwargs
    group = start_group(config, 1)
    try:
        rollout = generate(group, prompts, sampling, 1)
        agree(group, rollout, 2e-3)
        assert_measured(group, rollout, config)
        learn(group, rollout)
        group.run("sync_weights", 0)
        rollout = generate(group, prompts, sampling, 2)
        agree(group, rollout, 2e-3)
        assert_measured(group, rollout, config)
    finally:
        group.close()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "gemma2",
            {"calculator": {"layers": [0, -1]}},
            r"calculator\.layers=\[0, -1\]: vLLM .* set calculator\.la",
        ),
        ("olmo2", {"rollout": {"name": "vllm"}}, "model.path=.*no native class for olmo2 .* set rollout.name=hf$"),
    ],
)
def test_what_vllm_cannot_do_with_an_architecture_is_one_line(
    name, changes, message, small_config, tiny_tokenizer, tmp_path, ray_session
):
    config = changed(config_of(name, tmp_path, small_config, tiny_tokenizer), **changes)
    with pytest.raises(ConfigError, match=f"^{message}") as refused:
        start_group(config, 1)
    assert "\n" not in str(refused.value)
