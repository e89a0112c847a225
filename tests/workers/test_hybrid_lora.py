"""The hybrid worker with adapters and everything offloaded: Ray, FSDP2 over gloo, vLLM."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.conftest import changed
from tests.models.test_value_models import value_batch
from tests.workers.groups import all_prompts, policy_batch, sample, scored, start_group
from verl.batch import Batch
from verl.checkpoint.attempts import Attempt
from verl.checkpoint.export import export_checkpoint
from verl.checkpoint.saver import CheckpointSaver
from verl.config import PPOConfig
from verl.config.common import LoraConfig
from verl.models.forward import LogprobForward
from verl.models.output_head import Scoring
from verl.single_controller.worker_group import WorkerGroup

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def config(small_config: PPOConfig) -> PPOConfig:
    model = {
        "gradient_checkpointing": True,
        "lora": LoraConfig(rank=4, alpha=8.0, target_modules=["all-linear"], dropout=0.0),
        "fsdp": {"fsdp_size": 1, "param_offload": True, "optimizer_offload": True},
    }
    actor = {"optim": {"lr": 3e-3, "lr_warmup_steps": 0}, "use_kl_loss": True}
    parts = {"algorithm": {"adv_estimator": "gae"}, "calculator": {"source": "actor"}}
    return changed(small_config, model=model, actor=actor, critic={"model": model}, **parts)


@pytest.fixture(scope="module")
def workers(config: PPOConfig, ray_session: None) -> Iterator[WorkerGroup]:
    group = start_group(config, 2)
    yield group
    group.close()


def test_vllm_and_the_export_have_the_merged_weights(workers, config, tiny_tokenizer, tmp_path: Path):
    prompts, sampling = all_prompts(config, tiny_tokenizer), config.rollout.train_kwargs
    rollout = sample(workers, prompts, sampling, 1)
    policy = scored(workers, rollout)
    first, metrics = policy.logprobs, policy.rank_metrics
    # With calculator.source=actor the engine returns no states, and the policy measures them.
    assert not rollout.rank_metrics and "mean_states" not in rollout
    assert list(metrics) == config.calculator.metric_names
    assert metrics["Effective Rank"].shape == policy.mean_states.shape[:2] == (len(rollout), 2)

    def reference() -> torch.Tensor:
        return Batch.join(workers.run_split("compute_ref_logprobs", rollout)).logprobs

    def values() -> torch.Tensor:
        return Batch.join(workers.run_split("critic.compute_values", rollout)).values

    assert torch.equal(reference(), first)
    learning, targets = policy_batch(rollout, first), value_batch(rollout, values())
    for _ in range(5):
        workers.run_split("actor.update", learning, len(first), len(rollout))
        workers.run_split("critic.update", targets, len(first))
    assert (scored(workers, rollout).logprobs - first).abs().max() > 0.1
    # The reference policy is the policy without adapters, and stays where it was.
    assert torch.equal(reference(), first)
    assert values().abs().max() > 0

    workers.run("sync_weights", 0)
    fresh = sample(workers, prompts, sampling, 2)
    logprobs = scored(workers, fresh).logprobs
    assert (fresh.rollout_logprobs - logprobs).abs().max() < 1e-3

    CheckpointSaver(Attempt(tmp_path, 0), workers, background=False, huggingface=True, newest=0).save(
        1, {"step": 1}, {}
    )
    folder = tmp_path / "global_step_1"
    exported = AutoModelForCausalLM.from_pretrained(folder / "actor" / "huggingface").eval()
    scorer = LogprobForward(exported, replace(config.model, use_remove_padding=False), "cpu")
    with torch.no_grad():
        found = scorer.logprobs(fresh, Scoring(config.rollout.temperature)).logprobs
    assert (found - logprobs).abs().max() < 1e-5
    for name in ("actor", "critic"):
        assert (folder / name / "lora_adapter" / "adapter_model.safetensors").is_file()
        out = export_checkpoint(folder, tmp_path / name, name, False)
        merged = load_file(out / "model.safetensors")
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            assert (out / "lora_adapter" / file).read_bytes() == (folder / name / "lora_adapter" / file).read_bytes()
        written = load_file(folder / name / "huggingface" / "model.safetensors")
        assert merged.keys() == written.keys()
        assert max((merged[key] - written[key]).abs().max() for key in merged) < 1e-6

    # Adapters and optimizer go back to where they were, whatever is offloaded.
    workers.run_split("actor.update", learning, len(first), len(rollout))
    assert not torch.equal(scored(workers, fresh).logprobs, logprobs)
    workers.run("load", folder, 1)
    assert torch.equal(scored(workers, fresh).logprobs, logprobs)
