"""A sharded causal language model that scores responses."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from verl.batch import Batch
from verl.config.actor import ActorConfig
from verl.config.common import ModelConfig
from verl.models.forward import LogprobForward
from verl.models.fsdp import offloaded_parameters
from verl.models.loading import load_sharded_model
from verl.models.micro_batches import MicroBatching, join_parts
from verl.models.output_head import Scoring

Measure = Callable[[list[Tensor], Batch], Batch]
"""Hidden states [T, L, D] of responses in, their columns of rank metrics out."""


class Policy:
    """A sharded causal language model that scores responses.

    Legend: T tokens of a response, L layers, D hidden width.
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
        """Make the policy.

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
        batch: Batch,
        layers: Sequence[int] = (),
        measure: Measure | None = None,
        statistics: Sequence[str] = (),
    ) -> Batch:
        """Log-probabilities and entropies of the responses, and what ``measure`` makes of their hidden states.

        Args:
            layers: layers whose states are measured, see :func:`verl.models.forward.record_states`.
            measure: called with the states that the tokens of each response were sampled from; goes with ``layers``.
            statistics: names in :data:`verl.models.output_head.STATISTICS` of what is wanted, too, one number a token.

        Returns:
            The same episodes on the CPU with ``logprobs``, ``entropy``, the statistics, and what ``measure`` fills.
        """
        parts, cuts = [], self.scoring.cut(batch)
        scoring = Scoring(self.temperature, statistics=tuple(statistics))
        with self.parameters.loaded():
            for micro in (batch[cut] for cut in cuts):
                scored = self.forward.logprobs(micro, scoring, layers=layers)
                if measure is not None:
                    scored.merge(measure(scored.states, micro))
                parts.append(scored.without("states"))
        return join_parts(parts, cuts, batch.width)


def scoring_batches(config: ActorConfig, model: ModelConfig) -> MicroBatching:
    """Micro-batches of policy and reference where only log-probabilities are needed."""
    rows, max_tokens = config.log_prob_micro_batch_size_per_gpu, config.log_prob_max_token_len_per_gpu
    return MicroBatching.of(model, rows, max_tokens, config.use_dynamic_bsz, model.shares_prompts)
