"""The hybrid worker: every model of the run and the rollout engine in one process per device."""

from typing import Any

from torch import Tensor

from verl.config.ppo import PPOConfig, SamplingConfig
from verl.data.tokenizers import load_tokenizer
from verl.protocol import PolicyBatch, PromptBatch, RolloutBatch, TextBatch, ValueBatch
from verl.workers.actor import Actor, Policy
from verl.workers.checkpoint import Checkpointed, CheckpointWorker, TrainedPart
from verl.workers.critic import Critic
from verl.workers.distributed import WorkerPlace, join_world, seed_everything
from verl.workers.fsdp import full_parameters
from verl.workers.reward_model import RewardModel
from verl.workers.rollout.vllm_rollout import VLLMRollout


class HybridWorker(Checkpointed):
    """One of the processes that together hold actor, reference, critic, reward model and the rollout engines.

    Every method is called on all workers at once: FSDP gathers parameters collectively. What the configuration does
    not use is not loaded.
    """

    def __init__(self, config: PPOConfig, place: WorkerPlace, total_steps: int, capture: dict[str, Any] | None) -> None:
        """``capture``: what the rollout engine measures of its hidden states, see :class:`VLLMRollout`."""
        seed_everything(config.seed)
        mesh = join_world(place)
        self.tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
        temperature = config.rollout.temperature
        max_length = config.data.max_response_length
        actor_updates = config.actor_updates(total_steps)
        self.actor = Actor(config.actor, config.model, mesh, temperature, actor_updates, max_length)
        self.reference: Policy | None = None
        if config.uses_reference:
            micro_batch_size = config.actor.log_prob_micro_batch_size_per_gpu
            self.reference = Policy(config.model, mesh, micro_batch_size, temperature, trainable=False)
        critic_updates = config.critic_updates(total_steps)
        self.critic = Critic(config.critic, mesh, critic_updates) if config.uses_critic else None
        self.reward_model = RewardModel(config.reward_model, mesh) if config.uses_reward_model else None
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
        parts = [TrainedPart("actor", self.actor.learner, config.model, self.tokenizer)]
        if self.critic is not None:
            parts.append(TrainedPart("critic", self.critic.learner, config.critic.model, self.tokenizer))
        self.checkpoints = CheckpointWorker(parts, config.seed)

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

    def compute_values(self, batch: RolloutBatch) -> Tensor:
        """The critic's values [B, R]."""
        assert self.critic is not None, "no critic but with algorithm.adv_estimator=gae"
        return self.critic.compute_values(batch)

    def compute_rm_scores(self, batch: TextBatch) -> Tensor:
        """The reward model's scores [B]."""
        assert self.reward_model is not None, "no reward model without reward_model.enable"
        return self.reward_model.compute_scores(batch)

    def update_actor(self, batch: PolicyBatch, num_tokens: int, num_sequences: int) -> dict[str, float]:
        """One optimizer step of the policy on this worker's share of a mini-batch."""
        return self.actor.update(batch, num_tokens, num_sequences)

    def update_critic(self, batch: ValueBatch, num_tokens: int) -> dict[str, float]:
        """One optimizer step of the critic on this worker's share of a mini-batch."""
        assert self.critic is not None, "no critic but with algorithm.adv_estimator=gae"
        return self.critic.update(batch, num_tokens)

    def sync_weights(self) -> None:
        """Give the rollout engine the policy's weights."""
        self.rollout.load_weights(full_parameters(self.actor.model))
