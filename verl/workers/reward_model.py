"""A learned reward model: one score for a prompt with its response."""

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from verl.batch import Batch
from verl.config.rewards import RewardModelConfig
from verl.models.forward import ValueForward
from verl.models.fsdp import offloaded_parameters
from verl.models.value_models import load_sharded_value_model


class RewardModel:
    """A sharded sequence classification model with one output, never trained; used inside ``parameters.loaded()``.

    It is loaded as a value model: the score of a text is the value at the token that sequence classification reads, the
    last one that is not the checkpoint's padding token.
    """

    def __init__(self, config: RewardModelConfig, mesh: DeviceMesh) -> None:
        self.device = mesh.device_type
        self.micro_batch_size = config.micro_batch_size_per_gpu
        self.model = load_sharded_value_model(config.model, mesh, trainable=False, new_head=False)
        self.forward = ValueForward(self.model, config.model, mesh.device_type)
        self.parameters = offloaded_parameters(self.model, config.model.fsdp.param_offload)
        self.pad_token_id = self.model.config.pad_token_id

    @torch.no_grad()
    def compute_scores(self, batch: Batch) -> Batch:
        """The same texts on the CPU with ``scores`` [B] float32."""
        micros = (micro.to(self.device) for micro in batch.split(self.micro_batch_size))
        return Batch.join([micro.columns().fill(scores=self._scores(micro)) for micro in micros]).to("cpu")

    def _scores(self, micro: Batch) -> Tensor:
        values, tokens = micro.pad(self.forward.values(micro)), micro.padded("response_tokens")
        return values.gather(1, scored_positions(tokens, micro.mask, self.pad_token_id)).squeeze(1)


def scored_positions(input_ids: Tensor, attention_mask: Tensor, pad_token_id: int | None) -> Tensor:
    """[B, 1] int64, the last attended position of each row whose token is not ``pad_token_id``; 0 where all are.

    If a text ends in the padding token, that end does not count: such a head was trained without it.

    Args:
        input_ids, attention_mask: [B, S].
    """
    read = attention_mask.bool()
    if pad_token_id is not None:
        read = read & (input_ids != pad_token_id)
    positions = torch.arange(input_ids.shape[1], device=input_ids.device)
    return (positions * read).argmax(dim=1, keepdim=True)
