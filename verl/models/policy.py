"""A sharded causal language model that scores responses."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from verl.batch import Batch
from verl.config.actor import ActorConfig
from verl.config.common import ModelConfig
from verl.config.ppo import PPOConfig
from verl.models.forward import LogprobForward
from verl.models.fsdp import offloaded_parameters
from verl.models.loading import load_sharded_model
from verl.models.micro_batches import MicroBatching, join_parts
from verl.models.output_head import Scoring

Measure = Callable[[list[Tensor], Batch], Batch]
"""f(hidden states [T, L, D] of each response, batch) -> batch with columns for rank metrics."""


class Policy:
    """A sharded causal language model that scores responses.

    Shapes: T tokens of a response, L layers, D hidden size.
    """

    def __init__(
        self,
        config: ModelConfig,
        mesh: DeviceMesh,
        scoring_batches: MicroBatching,
        temperature: float,
        trainable: bool,
        source: PreTrainedModel | None = None,
        vocabulary: int | None = None,
    ) -> None:
        """Load the model.

        Args:
            scoring_batches: micro-batch limits for forward passes that are not followed by a backward pass.
            source: model to copy the weights from; see :func:`verl.models.loading.load_sharded_model`.
            vocabulary: number of token ids that the softmax covers, if responses come from a model whose head has a
                different size, or None. Larger token ids are replaced by the last of these.
        """
        self.model = load_sharded_model(config, mesh, trainable, source)
        self.forward = LogprobForward(self.model, config, mesh.device_type)
        self.parameters = offloaded_parameters(self.model, config.fsdp.param_offload)
        self.device = mesh.device_type
        self.scoring_batches = scoring_batches
        self.temperature = temperature
        self.vocabulary = vocabulary

    @torch.no_grad()
    def compute_logprobs(
        self,
        batch: Batch,
        layers: Sequence[int] = (),
        measure: Measure | None = None,
        statistics: Sequence[str] = (),
    ) -> Batch:
        """Compute log-probabilities, entropies and, if ``measure`` is set, rank metrics of the responses.

        Args:
            layers: indices of the layers to measure; see :func:`verl.models.forward.record_states`.
            measure: function that computes rank metrics from the hidden states that predict each response's tokens.
            statistics: additional per-token statistics to compute, from :data:`verl.models.output_head.STATISTICS`.

        Returns:
            The same episodes on the CPU with ``logprobs``, ``entropy``, the statistics, and the columns of ``measure``.
        """
        if self.vocabulary is not None:
            batch = batch.columns("tokens", "source").fill(tokens=batch.tokens.clamp(max=self.vocabulary - 1))
        parts, cuts = [], self.scoring_batches.cut(batch)
        scoring = Scoring(self.temperature, statistics=tuple(statistics), vocabulary=self.vocabulary)
        with self.parameters.loaded():
            for micro in (batch[cut] for cut in cuts):
                scored = self.forward.logprobs(micro, scoring, layers=layers)
                if measure is not None:
                    scored.merge(measure(scored.states, micro))
                parts.append(scored.without("states"))
        return join_parts(parts, cuts, batch.width)


def scoring_batches(config: ActorConfig, model: ModelConfig) -> MicroBatching:
    """Return the micro-batch limits for computing log-probabilities with the policy and the reference model."""
    rows, max_tokens = config.log_prob_micro_batch_size_per_gpu, config.log_prob_max_token_len_per_gpu
    return MicroBatching.of(model, rows, max_tokens, config.use_dynamic_bsz, model.shares_prompts)


def copy_policy(policy: Policy, config: PPOConfig, mesh: DeviceMesh, param_offload: bool, trainable: bool) -> Policy:
    """Return a copy of the policy with its current weights and the same sharding.

    Args:
        config: config of the run, whose policy this is.
        param_offload: whether the copy's parameters stay in host memory while not in use.
        trainable: whether to keep the weights in float32; frozen weights have the precision of the forward pass.
    """
    model = replace(config.model, fsdp=replace(config.model.fsdp, param_offload=param_offload))
    scoring, temperature = scoring_batches(config.actor, model), config.rollout.temperature
    with policy.parameters.loaded():
        return Policy(model, mesh, scoring, temperature, trainable, source=policy.model)
