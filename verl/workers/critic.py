"""The critic: the value of a response at each of its tokens."""

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from verl.algorithms.losses import token_mean, value_loss
from verl.batch import Batch
from verl.config.ppo import CriticConfig
from verl.models.forward import ValueForward
from verl.models.fsdp import offloaded_parameters
from verl.models.learner import Learner
from verl.models.micro_batches import MicroBatching, join_parts
from verl.models.value_models import load_sharded_value_model


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
    def compute_values(self, batch: Batch) -> Batch:
        """The same episodes on the CPU with ``values``: that of a token is read at the one before it."""
        cuts = self._cut(batch)
        micros = (batch[rows] for rows in cuts)
        parts = [micro.columns().to(self.device).fill(values=self._values(micro)) for micro in micros]
        return join_parts(parts, cuts, batch.width)

    def update(self, batch: Batch, num_tokens: int) -> dict[str, float]:
        """One optimizer step on this rank's share of a mini-batch.

        Args:
            batch: this rank's responses with ``learn_mask``, ``values`` from before the update, and ``returns``.
            num_tokens: tokens to learn from in the whole mini-batch, over all ranks.

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

    def _cut(self, batch: Batch) -> list[Tensor]:
        """Rows of each micro-batch."""
        config = self.config
        max_tokens = config.ppo_max_token_len_per_gpu if config.use_dynamic_bsz else None
        return MicroBatching.of(config.model, config.micro_batch_size_per_gpu, max_tokens).cut(batch)

    def _loss(self, micro: Batch, num_tokens: int) -> tuple[Tensor, dict[str, Tensor]]:
        micro = micro.trimmed().to(self.device)
        values, mask = micro.pad(self._values(micro)), micro.padded("learn_mask")
        old_values, returns = micro.padded("values"), micro.padded("returns")
        per_token, sums = value_loss(values, old_values, returns, mask, self.config.cliprange_value)
        loss = token_mean(per_token, mask, num_tokens)
        return loss, sums | {"loss": loss, "values": (values.detach() * mask).sum()}

    def _values(self, micro: Batch) -> Tensor:
        """[M]. As with logits, the value before a token is computed at the one before it."""
        return self.forward.values(micro)[micro.predictors.to(self.device)]
