"""The critic: the value of a response at each of its tokens.

Legend: B responses on this rank, R response columns.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from verl.algorithms.losses import token_mean, value_loss
from verl.config.ppo import CriticConfig
from verl.models.forward import ValueForward
from verl.models.fsdp import offloaded_parameters
from verl.models.learner import Learner
from verl.models.micro_batches import MicroBatching, restore_order
from verl.models.packing import trim_columns
from verl.models.value_models import load_sharded_value_model
from verl.protocol import RolloutBatch, ValueBatch


class Critic:
    """A sharded value model with its optimizer, for use inside ``with critic.parameters.loaded():``."""

    def __init__(self, config: CriticConfig, mesh: DeviceMesh, total_steps: int) -> None:
        self.config = config
        self.device = mesh.device_type
        self.model = load_sharded_value_model(config.model, mesh, trainable=True, new_head=True)
        self.forward = ValueForward(self.model, config.model, mesh.device_type)
        fsdp, sequence = config.model.fsdp, config.model.ulysses_sequence_parallel_size
        self.parameters = offloaded_parameters(self.model, fsdp.param_offload)
        self.learner = Learner(self.model, config.optim, total_steps, fsdp.optimizer_offload, sequence)

    @torch.no_grad()
    def compute_values(self, batch: RolloutBatch) -> Tensor:
        """Values [B, R] float32 on the CPU, 0 on padding: column t before response token t is read."""
        cuts, parts, num_columns = self._cut(batch), [], batch.response_mask.shape[1]
        for rows in cuts:
            found, mask = self._values(batch[rows])
            parts.append(F.pad(found * mask, (0, num_columns - found.shape[1])))
        return restore_order(parts, cuts)

    def update(self, batch: ValueBatch, num_tokens: int) -> dict[str, float]:
        """One optimizer step on this rank's share of a mini-batch.

        Args:
            batch: this rank's responses.
            num_tokens: tokens in the response masks of the whole mini-batch, over all ranks.

        Returns:
            Metrics of the whole mini-batch, the same on every rank.
        """
        sums, state = self.learner.step(self._cut(batch), lambda rows: self._loss(batch[rows], num_tokens))
        metrics = {
            "vf_loss": sums["loss"],
            "vf_clipfrac": sums["vf_clipfrac"] / num_tokens,
            "vpred_mean": sums["values"] / num_tokens,
        }
        return {f"critic/{name}": value for name, value in (metrics | state).items()}

    def _cut(self, batch: RolloutBatch | ValueBatch) -> list[Tensor]:
        """Rows of each micro-batch."""
        config = self.config
        max_tokens = config.ppo_max_token_len_per_gpu if config.use_dynamic_bsz else None
        return MicroBatching.of(config.model, config.micro_batch_size_per_gpu, max_tokens).cut(batch)

    def _loss(self, micro: ValueBatch, num_tokens: int) -> tuple[Tensor, dict[str, Tensor]]:
        values, mask = self._values(micro)
        old_values, returns = (t[:, : mask.shape[1]].to(self.device) for t in (micro.old_values, micro.returns))
        per_token, sums = value_loss(values, old_values, returns, mask, self.config.cliprange_value)
        loss = token_mean(per_token, mask, num_tokens)
        return loss, sums | {"loss": loss, "values": (values.detach() * mask).sum()}

    def _values(self, micro: RolloutBatch | ValueBatch) -> tuple[Tensor, Tensor]:
        """Values and mask over the columns that the micro-batch uses."""
        columns = trim_columns(micro.input_ids, micro.attention_mask, micro.response_mask)
        input_ids, attention_mask, mask = (t.to(self.device) for t in columns)
        # As with logits, the value before token t is computed at token t - 1.
        return self.forward.values(input_ids, attention_mask)[:, -mask.shape[1] - 1 : -1], mask
