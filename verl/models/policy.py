"""A sharded causal language model that scores responses."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from verl.config.common import ModelConfig
from verl.config.ppo import ActorConfig
from verl.models.forward import LogprobForward
from verl.models.fsdp import offloaded_parameters
from verl.models.loading import load_sharded_model
from verl.models.micro_batches import MicroBatching, in_order
from verl.models.packing import trim_columns
from verl.protocol import PolicyBatch, RolloutBatch

Reducer = Callable[[list[Tensor]], list[dict[str, Tensor]]]
"""Hidden states [T, L, D] of responses in, named tensors of each out."""


class Policy:
    """A sharded causal language model that scores responses, inside ``with policy.parameters.loaded():``.

    Legend: B responses on this rank, R response columns, T tokens of a response, L layers, D hidden width.
    """

    def __init__(
        self, config: ModelConfig, mesh: DeviceMesh, scoring: MicroBatching, temperature: float, trainable: bool
    ) -> None:
        """``scoring``: how large micro-batches are without a backward pass."""
        self.model = load_sharded_model(config, mesh, trainable)
        self.forward = LogprobForward(self.model, config, mesh.device_type)
        self.parameters = offloaded_parameters(self.model, config.fsdp.param_offload)
        self.device = mesh.device_type
        self.scoring = scoring
        self.temperature = temperature

    @torch.no_grad()
    def compute_logprobs(self, batch: RolloutBatch) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies [B, R] float32 of the responses, 0 on padding, on the CPU."""
        scored, cuts = [], self.scoring.cut(batch)
        for rows in cuts:
            micro = batch[rows]
            logprobs, entropy = self.forward.logprobs(*self._columns(micro), self.temperature)
            scored.append([_full_width(values, micro) for values in (logprobs, entropy)])
        logprobs, entropy = (in_order(parts, cuts) for parts in zip(*scored, strict=True))
        return logprobs, entropy

    @torch.no_grad()
    def compute_logprobs_and_metrics(
        self, batch: RolloutBatch, layers: Sequence[int], reduce: Reducer
    ) -> tuple[Tensor, Tensor, TensorDict, Tensor]:
        """As :meth:`compute_logprobs`, and what ``reduce`` makes of the states that the responses were sampled from.

        Args:
            layers: those to measure, see :func:`verl.models.hidden_states.record_states`.
            reduce: states [T, L, D] of responses in, for each of them metrics [L] and ``mean_state`` [L, D] out.

        Returns:
            logprobs and entropy [B, R], metrics [B, L] by name, mean states [B, L, D], all on the CPU.
        """
        scored, measured, cuts = [], [], self.scoring.cut(batch)
        for rows in cuts:
            micro = batch[rows]
            logprobs, entropy, states = self.forward.logprobs_and_states(
                *self._columns(micro), self.temperature, layers
            )
            scored.append([_full_width(values, micro) for values in (logprobs, entropy)])
            measured += [{name: value.cpu() for name, value in row.items()} for row in reduce(states)]
        logprobs, entropy = (in_order(parts, cuts) for parts in zip(*scored, strict=True))
        stacked = {name: torch.stack([row[name] for row in measured]) for name in measured[0]}
        metrics = {name: in_order([values], [torch.cat(cuts)]) for name, values in stacked.items()}
        mean_states = metrics.pop("mean_state")
        return logprobs, entropy, TensorDict(metrics, batch_size=[len(batch)]), mean_states

    def _columns(self, micro: RolloutBatch | PolicyBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens and attention mask [B, S] and response mask [B, R] on the device, as few columns as rows need."""
        columns = trim_columns(micro.input_ids, micro.attention_mask, micro.response_mask)
        input_ids, attention_mask, response_mask = (t.to(self.device) for t in columns)
        return input_ids, attention_mask, response_mask


def _full_width(values: Tensor, micro: RolloutBatch) -> Tensor:
    """[B, R] on the CPU, 0 in the columns that were cut."""
    return F.pad(values.cpu(), (0, micro.response_mask.shape[1] - values.shape[1]))


def scoring_batches(config: ActorConfig, model: ModelConfig) -> MicroBatching:
    """Micro-batches of policy and reference where only log-probabilities are needed."""
    max_tokens = config.log_prob_max_token_len_per_gpu if config.use_dynamic_bsz else None
    return MicroBatching.of(model, config.log_prob_micro_batch_size_per_gpu, max_tokens)
