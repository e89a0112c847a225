"""A learned reward model: one score for a prompt with its response."""

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from verl.config.ppo import RewardModelConfig
from verl.protocol import TextBatch
from verl.workers.forward import token_values
from verl.workers.fsdp import load_sharded_value_model


class RewardModel:
    """A sharded sequence classification model with one output, never trained.

    It is held as a value model: the score of a text is the number at its last token, which is what sequence
    classification computes, without its guess at which tokens are padding.
    """

    def __init__(self, config: RewardModelConfig, mesh: DeviceMesh) -> None:
        self.device = mesh.device_type
        self.micro_batch_size = config.micro_batch_size_per_gpu
        self.model = load_sharded_value_model(config.model, mesh, trainable=False, new_head=False)

    @torch.no_grad()
    def compute_scores(self, batch: TextBatch) -> Tensor:
        """Scores [B] float32 on the CPU."""
        return torch.cat([self._score(micro) for micro in batch.split(self.micro_batch_size)])

    def _score(self, micro: TextBatch) -> Tensor:
        lengths = micro.attention_mask.sum(dim=1)
        longest = int(lengths.max())
        input_ids, attention_mask = (t[:, :longest].to(self.device) for t in (micro.input_ids, micro.attention_mask))
        values = token_values(self.model, input_ids, attention_mask).cpu()
        return values.gather(1, lengths.unsqueeze(1) - 1).squeeze(1)
