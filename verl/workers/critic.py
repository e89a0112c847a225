"""Models with scalar outputs: the critic, which predicts a value per token, and a learned reward model."""

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from verl.algorithms.losses import token_mean, value_loss
from verl.batch import Batch
from verl.config.common import ModelConfig
from verl.config.ppo import CriticConfig
from verl.config.rewards import RewardModelConfig
from verl.models.forward import ValueForward
from verl.models.fsdp import offloaded_parameters
from verl.models.learner import Learner
from verl.models.loading import load_sharded_value_model
from verl.models.micro_batches import MicroBatching, join_parts
from verl.utils.device import to_device


class ValueModel:
    """Sharded model with one scalar output per token."""

    def __init__(self, config: ModelConfig, mesh: DeviceMesh, trainable: bool) -> None:
        self.device = mesh.device_type
        self.model = load_sharded_value_model(config, mesh, trainable)
        self.forward = ValueForward(self.model, config, mesh.device_type)
        self.parameters = offloaded_parameters(self.model, config.fsdp.param_offload)


class Critic(ValueModel):
    """Trainable value model with its optimizer."""

    def __init__(self, config: CriticConfig, mesh: DeviceMesh, total_steps: int) -> None:
        super().__init__(config.model, mesh, trainable=True)
        self.config = config
        offload, sequence = config.model.fsdp.optimizer_offload, config.model.ulysses_sequence_parallel_size
        rows, max_tokens = config.micro_batch_size_per_gpu, config.ppo_max_token_len_per_gpu
        self.micro_batches = MicroBatching.of(config.model, rows, max_tokens, config.use_dynamic_bsz)
        self.learner = Learner(self.model, config.optim, total_steps, offload, sequence)

    @torch.no_grad()
    def compute_values(self, batch: Batch) -> Batch:
        """Return episodes with ``values``, on the CPU. Each token's value is computed at the preceding token."""
        cuts = self.micro_batches.cut(batch)
        micros = (batch[rows] for rows in cuts)
        with self.parameters.loaded():
            parts = [micro.columns().to(self.device).fill(values=self._values(micro)) for micro in micros]
        return join_parts(parts, cuts, batch.width)

    def update(self, batch: Batch, num_tokens: int) -> dict[str, float]:
        """Take one optimizer step on this rank's share of a mini-batch.

        Args:
            batch: This rank's responses with ``learn_mask``, ``returns``, and the ``values`` from before the update.
            num_tokens: Number of learned tokens in the whole mini-batch, across all ranks.

        Returns:
            Metrics of the whole mini-batch, identical on every rank.
        """
        cuts = self.micro_batches.cut(batch)
        with self.parameters.loaded():
            sums, state = self.learner.step(cuts, lambda rows: self._loss(batch[rows], num_tokens))
        metrics = {
            "vf_loss": sums["loss"],
            "vf_clipfrac": sums["vf_clipfrac"] / num_tokens,
            "vpred_mean": sums["values"] / num_tokens,
        }
        return {f"critic/{name}": value for name, value in (metrics | state).items()}

    def _loss(self, micro: Batch, num_tokens: int) -> tuple[Tensor, dict[str, Tensor]]:
        micro = micro.trimmed()
        values, micro = micro.pad(self._values(micro)), micro.to(self.device)
        mask = micro.padded("learn_mask")
        old_values, returns = micro.padded("values"), micro.padded("returns")
        per_token, sums = value_loss(values, old_values, returns, mask, self.config.cliprange_value)
        loss = token_mean(per_token, mask, num_tokens)
        return loss, sums | {"loss": loss, "values": (values.detach() * mask).sum()}

    def _values(self, micro: Batch) -> Tensor:
        """Return values [M]. Each token's value, like its logits, is computed at the preceding token."""
        return self.forward.values(micro)[to_device(micro.predictors, self.device)]


class RewardModel(ValueModel):
    """Sequence classification model with one output and frozen weights.

    The reward model is loaded as a value model. As in sequence classification, a conversation's score is the value at
    its last token that is not the padding token.
    """

    def __init__(self, config: RewardModelConfig, mesh: DeviceMesh) -> None:
        super().__init__(config.model, mesh, trainable=False)
        self.micro_batch_size = config.micro_batch_size_per_gpu
        self.pad_token_id = self.model.config.pad_token_id

    @torch.no_grad()
    def compute_scores(self, batch: Batch) -> Batch:
        """Compute ``scores`` of shape [B] in float32 and return the conversations on the CPU."""
        micros = batch.split(self.micro_batch_size)
        with self.parameters.loaded():
            parts = [micro.columns().to(self.device).fill(scores=self._scores(micro)) for micro in micros]
            return Batch.join(parts).to("cpu")

    def _scores(self, micro: Batch) -> Tensor:
        values, micro = micro.pad(self.forward.values(micro)), micro.to(self.device)
        tokens = micro.padded("response_tokens")
        return values.gather(1, scored_positions(tokens, micro.mask, self.pad_token_id)).squeeze(1)


def scored_positions(input_ids: Tensor, attention_mask: Tensor, pad_token_id: int | None) -> Tensor:
    """Return each sequence's last attended position without padding token, or 0 if there is none, as [B, 1] int64.

    Trailing padding tokens are skipped even if they belong to the conversation, as in training classification heads.

    Args:
        input_ids, attention_mask: Tensors of shape [B, S].
    """
    read = attention_mask.bool()
    if pad_token_id is not None:
        read = read & (input_ids != pad_token_id)
    positions = torch.arange(input_ids.shape[1], device=input_ids.device)
    return (positions * read).argmax(dim=1, keepdim=True)
