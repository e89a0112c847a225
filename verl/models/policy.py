"""A sharded causal language model that scores responses."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from verl.config.actor import ActorConfig
from verl.config.common import ModelConfig
from verl.models.forward import LogprobForward
from verl.models.fsdp import offloaded_parameters
from verl.models.loading import load_sharded_model
from verl.models.micro_batches import MicroBatching, restore_order
from verl.models.packing import trim_columns
from verl.protocol import PolicyBatch, PolicyScores, RankMetrics, RolloutBatch

Measure = Callable[[list[Tensor]], RankMetrics]
"""Hidden states [T, L, D] of responses in, their rank metrics out."""


class Policy:
    """A sharded causal language model that scores responses, inside ``with policy.parameters.loaded():``.

    Legend: B responses on this rank, R response columns, T tokens of a response, L layers, D hidden width.
    """

    def __init__(
        self,
        config: ModelConfig,
        mesh: DeviceMesh,
        scoring: MicroBatching,
        temperature: float,
        trainable: bool,
        source: PreTrainedModel | None = None,
    ) -> None:
        """
        Args:
            scoring: how large micro-batches are without a backward pass.
            source: see :func:`verl.models.loading.load_sharded_model`.
        """
        self.model = load_sharded_model(config, mesh, trainable, source)
        self.forward = LogprobForward(self.model, config, mesh.device_type)
        self.parameters = offloaded_parameters(self.model, config.fsdp.param_offload)
        self.device = mesh.device_type
        self.scoring = scoring
        self.temperature = temperature

    @torch.no_grad()
    def compute_logprobs(
        self,
        batch: RolloutBatch,
        layers: Sequence[int] = (),
        measure: Measure | None = None,
        statistics: Sequence[str] = (),
    ) -> PolicyScores:
        """Log-probabilities and entropies of the responses, and what ``measure`` makes of their hidden states.

        Args:
            layers: layers whose states are measured, see :func:`verl.models.hidden_states.record_states`.
            measure: called with the states that the tokens of each response were sampled from; goes with ``layers``.
            statistics: names in :data:`verl.models.output_head.STATISTICS` of what is wanted, too, one number a token.

        Returns:
            One row per response, on the CPU.
        """
        logprobs, entropies, rows, cuts = [], [], [], self.scoring.cut(batch)
        further = dict[str, list[Tensor]]()
        for micro in (batch[cut] for cut in cuts):
            scored = self.forward.logprobs(
                *self._columns(micro), self.temperature, layers=layers, statistics=statistics
            )
            logprobs.append(full_width(scored.logprobs, micro))
            entropies.append(full_width(scored.entropy, micro))
            for name, values in scored.statistics.items():
                further.setdefault(name, []).append(full_width(values, micro))
            if measure is not None:
                rows += measure(scored.states).to_rows()
        metrics = RankMetrics.none(len(batch))
        if rows:
            metrics = RankMetrics.from_rows(rows, batch.response_mask.shape[1])[torch.cat(cuts).argsort()]
        ordered, entropy = (restore_order(parts, cuts) for parts in (logprobs, entropies))
        named = {name: restore_order(parts, cuts) for name, parts in further.items()}
        tensors = TensorDict(named, batch_size=[len(batch)]) if named else None
        return PolicyScores(ordered, entropy, metrics, tensors, batch_size=[len(batch)])

    def _columns(self, micro: RolloutBatch | PolicyBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens and attention mask [B, S] and response mask [B, R] on the device, as few columns as rows need."""
        columns = trim_columns(micro.input_ids, micro.attention_mask, micro.response_mask)
        input_ids, attention_mask, response_mask = (t.to(self.device) for t in columns)
        return input_ids, attention_mask, response_mask


def full_width(values: Tensor, micro: RolloutBatch | PolicyBatch) -> Tensor:
    """``values`` of the columns that were left of ``micro``'s, [B, R] with 0 in those that were cut."""
    return F.pad(values, (0, micro.response_mask.shape[1] - values.shape[1]))


def scoring_batches(config: ActorConfig, model: ModelConfig) -> MicroBatching:
    """Micro-batches of policy and reference where only log-probabilities are needed."""
    max_tokens = config.log_prob_max_token_len_per_gpu if config.use_dynamic_bsz else None
    return MicroBatching.of(model, config.log_prob_micro_batch_size_per_gpu, max_tokens)
