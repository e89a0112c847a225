"""The hybrid worker: trained policy, reference policy and rollout engine in one process per device."""

from pathlib import Path
from typing import Any

from torch import Tensor

from verl.config.ppo import PPOConfig, SamplingConfig
from verl.data.tokenizers import load_tokenizer
from verl.protocol import PolicyBatch, PromptBatch, RolloutBatch
from verl.workers.actor import Actor, Policy
from verl.workers.distributed import WorkerPlace, join_world, seed_everything
from verl.workers.fsdp import export_huggingface, full_parameters
from verl.workers.rollout.vllm_rollout import VLLMRollout


class HybridWorker:
    """One of the processes that together hold the actor, the reference and the rollout engines.

    Every method is called on all workers at once: FSDP gathers parameters collectively.
    """

    def __init__(
        self, config: PPOConfig, place: WorkerPlace, total_updates: int, capture: dict[str, Any] | None
    ) -> None:
        """``capture``: what the rollout engine measures of its hidden states, see :class:`VLLMRollout`."""
        seed_everything(config.seed)
        mesh = join_world(place)
        self.tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
        temperature = config.rollout.temperature
        max_length = config.data.max_response_length
        self.actor = Actor(config.actor, config.model, mesh, temperature, total_updates, max_length)
        self.reference: Policy | None = None
        if config.uses_reference:
            micro_batch_size = config.actor.micro_batch_size_per_gpu
            self.reference = Policy(config.model, mesh, micro_batch_size, temperature, trainable=False)
        self.rollout = VLLMRollout(
            config.rollout,
            config.data,
            config.model.path,
            config.model.trust_remote_code,
            place.device_type,
            config.seed,
            self.tokenizer.pad_token_id,
            capture,
        )

    def generate(self, prompts: PromptBatch, sampling: SamplingConfig, seed: int) -> RolloutBatch:
        """Sample responses for this worker's prompts."""
        return self.rollout.generate(prompts, sampling, seed)

    def compute_logprobs(self, batch: RolloutBatch) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies [B, R] under the policy."""
        return self.actor.compute_logprobs(batch)

    def compute_ref_logprobs(self, batch: RolloutBatch) -> Tensor:
        """Log-probabilities [B, R] under the reference policy."""
        assert self.reference is not None, "no reference policy without a KL divergence in loss or reward"
        return self.reference.compute_logprobs(batch)[0]

    def update_actor(self, batch: PolicyBatch, num_tokens: int, num_sequences: int) -> dict[str, float]:
        """One optimizer step on this worker's share of a mini-batch."""
        return self.actor.update(batch, num_tokens, num_sequences)

    def sync_weights(self) -> None:
        """Give the rollout engine the policy's weights."""
        self.rollout.load_weights(full_parameters(self.actor.model))

    def save_actor(self, folder: Path) -> None:
        """Write the policy to ``folder/huggingface``."""
        export_huggingface(self.actor.model, self.tokenizer, folder / "huggingface")
