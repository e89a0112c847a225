"""The memory of a training run on each GPU, phase by phase, from options alone; docs/memory.md derives the terms.

They hold for decoder-only models with gated MLPs (Qwen, Llama, Mistral). The bytes of activations were counted from
what autograd saves.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from verl.cluster.failures import ON_GPU, fix
from verl.config.common import ModelConfig
from verl.config.errors import ConfigError
from verl.config.ppo import PPOConfig
from verl.models.info import ModelInfo
from verl.rank.calculator import workspace_bytes
from verl.rollout.hidden_states import reserved_bytes

GB = 1e9
CONTEXT_GB = 2.0
"""CUDA context, kernels and NCCL's buffers; a guess that holds for one process per GPU."""
LOGITS_BYTES = 12
"""Per token and vocabulary entry, besides the logits themselves: log-softmax, probabilities and their product, in
float32."""
ENTROPY_BYTES = 20
"""The same, logits included, in the backward pass if the entropy has a gradient (``actor.entropy_coeff``)."""
SAMPLING_BYTES = 32
"""The same if ``rollout.name=hf`` draws a token: probabilities and their sums in float64, sorted for ``top_p``."""

ITEMSIZE = {"bfloat16": 2, "float32": 4}
"""Bytes of a number in ``param_dtype``."""
ENGINE_ITEMSIZE = {"float32": 4}
"""Bytes of a weight in ``rollout.dtype``; 2 for all others."""

SAME_MODEL = 0.05
"""Share of a model's parameters that its norms and biases may have."""

WARNED = 0.9
"""Share of a GPU's memory above which a run is warned: the estimate leaves out fragments and temporaries."""
METHODS = {"generate": "sync_weights", "sync": "sync_weights", "logprobs": "compute_logprobs"}
METHODS |= {"update, backward": "update_actor", "critic, backward": "update_critic"}
"""Phase -> the worker's method whose fixes apply to it; the optimizers' steps need what loading needs."""

Parts = dict[str, float]
"""Holder of memory -> GB on one GPU."""


class Shape(NamedTuple):
    """A model's sizes."""

    hidden: int
    intermediate: int
    layers: int
    attention: int
    """Heads times their width."""
    kv: int
    """Heads of keys, or values, times their width."""
    vocabulary: int
    tied: bool

    @classmethod
    def of(cls, config: Any) -> "Shape":
        """The sizes in a ``transformers`` config; raises ``AttributeError`` if they are not all there."""
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        sizes = (config.hidden_size, config.intermediate_size, config.num_hidden_layers)
        heads = (config.num_attention_heads * head, config.num_key_value_heads * head)
        return cls(*sizes, *heads, config.vocab_size, config.tie_word_embeddings)

    @property
    def linears(self) -> dict[str, int]:
        """Inputs plus outputs of each matrix of a layer."""
        d, i = self.hidden, self.intermediate
        attention = {"q_proj": d + self.attention, "k_proj": d + self.kv, "v_proj": d + self.kv}
        return attention | {"o_proj": self.attention + d, "gate_proj": d + i, "up_proj": d + i, "down_proj": i + d}

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer's matrices, without norms and biases."""
        return self.hidden * (2 * self.attention + 2 * self.kv + 3 * self.intermediate)

    @property
    def root_parameters(self) -> int:
        """Parameters of embedding and head."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.root_parameters

    def trainable(self, model: ModelConfig) -> int:
        """Parameters with gradients and moments: all, or those of the adapters."""
        lora = model.lora
        if not model.trains_adapters:
            return self.parameters
        chosen = [n for name, n in self.linears.items() if {name, "all-linear"} & set(lora.target_modules)]
        return self.layers * lora.rank * sum(chosen)

    def activations(self, tokens: float, model: ModelConfig) -> float:
        """Bytes saved for the backward pass, for a micro-batch of ``tokens`` tokens on this worker."""
        scale = {"bfloat16": 1, "float32": 2}[model.param_dtype]
        # With a padding mask, torch's attention needs a key and a value for every query.
        keys = self.kv if model.use_remove_padding else self.attention
        layer = scale * (20 * self.hidden + 8 * self.intermediate + 4 * keys)
        if model.gradient_checkpointing:
            return tokens * (2 * scale * self.hidden * self.layers + layer)
        return tokens * layer * self.layers

    def passing(self, tokens: float, model: ModelConfig) -> float:
        """Bytes that a layer holds at most while ``tokens`` tokens pass it and nothing is saved: in the MLP, two
        factors and their product beside the residual stream and what attention left."""
        return tokens * ITEMSIZE[model.param_dtype] * (3 * self.intermediate + 5 * self.hidden)


class Shapes(NamedTuple):
    """The sizes of a run's models; a critic or a reward model without is not counted. A reference has the policy's."""

    policy: Shape
    critic: Shape | None = None
    judge: Shape | None = None
    """The reward model."""


class Held(NamedTuple):
    """A model on one GPU, in GB."""

    parameters: float
    gradients: float
    moments: float
    gathered: float
    """Whole parameters of the root and of two layers, in ``param_dtype``."""
    reduced: float
    """Whole gradients of the root and of one layer, before they are sharded."""

    @classmethod
    def of(cls, shape: Shape, model: ModelConfig, workers: int, learns: bool = True) -> "Held":
        shards, itemsize = model.fsdp.workers_per_copy(workers), ITEMSIZE[model.param_dtype]
        trainable = shape.trainable(model) if learns else 0
        whole = not model.trains_adapters
        return cls(
            (4 * trainable + itemsize * (shape.parameters - trainable)) / shards / GB,
            4 * trainable / shards / GB,
            8 * trainable / shards / GB,
            itemsize * (shape.root_parameters + 2 * shape.layer_parameters) / GB,
            (itemsize * shape.root_parameters + (itemsize + 4) * shape.layer_parameters) / GB if whole else 0.0,
        )

    def idle(self, param_offload: bool, optimizer_offload: bool = False) -> float:
        """Memory while other models are in use."""
        return self.parameters * (not param_offload) + self.moments * (not optimizer_offload)


def estimate(config: PPOConfig, shapes: Shapes, gpu_gb: float) -> dict[str, Parts]:
    """GB on one GPU by phase and holder."""
    shape, critic_shape, judge = shapes
    model, workers = config.model, config.trainer.world_size
    fsdp, parallel = model.fsdp, model.ulysses_sequence_parallel_size
    policy = Held.of(shape, model, workers)
    longest, longest_response = config.max_sequence_length, config.data.max_response_length
    update = config.actor.micro_batch_size_per_gpu * longest / parallel
    forward = config.actor.log_prob_micro_batch_size_per_gpu * longest / parallel
    if config.actor.use_dynamic_bsz:
        # The limit of one worker: workers that share sequences take a multiple of it together.
        update, forward = config.actor.ppo_max_token_len_per_gpu, config.actor.log_prob_max_token_len_per_gpu

    others: Parts = {}
    if config.uses_reference and not model.trains_adapters:
        others["reference"] = Held.of(shape, model, workers, learns=False).idle(config.ref.param_offload)
    if critic_shape is not None:
        critic = config.critic.model
        held = Held.of(critic_shape, critic, workers)
        others["critic"] = held.idle(critic.fsdp.param_offload, critic.fsdp.optimizer_offload)
    if judge is not None:
        frozen = config.reward_model.model
        others["reward model"] = Held.of(judge, frozen, workers, learns=False).idle(frozen.fsdp.param_offload)
    others["context"] = CONTEXT_GB
    generating = _generating(config, shape, gpu_gb)
    sleeping = {} if config.rollout.free_cache_engine or config.rollout.name == "hf" else generating
    moments = 0.0 if fsdp.optimizer_offload else policy.moments

    def logits(num_bytes: int, tokens: float) -> float:
        responses = tokens * longest_response / longest
        alive = min(model.logits_chunk_size or responses, responses)
        return num_bytes * alive * shape.vocabulary / GB

    at_work = {"parameters": policy.parameters, "moments": moments, **others}
    resting = at_work | {"parameters": 0.0 if fsdp.param_offload else policy.parameters}
    learning = at_work | {"gradients": policy.gradients}
    activations = shape.activations(update, model) / GB
    sync = _syncing(config, shape) / GB
    scored = ITEMSIZE[model.param_dtype] + LOGITS_BYTES
    learned = ENTROPY_BYTES if config.actor.entropy_coeff else scored
    spectra = {}
    if config.calculator.measured_by("actor"):
        sizes = (longest_response, len(config.calculator.layers), shape.hidden)
        spectra["spectra"] = workspace_bytes(*sizes, config.calculator) / GB
    # The head comes after the layers.
    scoring = {"logits": logits(scored, forward), "activations": shape.passing(forward, model) / GB}
    largest = max(scoring, key=lambda part: scoring[part])
    phases = {
        "generate": (at_work if config.rollout.name == "hf" else resting) | generating,
        "logprobs": at_work | sleeping | spectra | {"gathered": policy.gathered, largest: scoring[largest]},
        "update, backward": learning
        | sleeping
        | {"gathered": policy.gathered, "whole gradients": policy.reduced, "activations": activations}
        | {"logits": logits(learned, update)},
        # AdamW's step over all parameters at once makes a temporary of the same size.
        "update, step": learning | sleeping | {"moments": policy.moments, "temporary": policy.gradients},
        "sync": at_work | generating | {"bucket": sync},
    }
    if config.rollout.name == "hf":
        del phases["sync"]
    if critic_shape is not None:
        phases |= _critic_phases(config, critic_shape, resting | sleeping)
    return phases


def _syncing(config: PPOConfig, shape: Shape) -> float:
    """Bytes of a weight sync: a bucket, this worker's part of it, a parameter taken out of it, and vLLM's copy."""
    rollout, itemsize = config.rollout, ENGINE_ITEMSIZE.get(config.rollout.dtype, 2)
    largest = itemsize * shape.vocabulary * shape.hidden
    bucket = min(max(rollout.update_weights_bucket_megabytes << 20, largest), itemsize * shape.parameters)
    part = bucket / config.model.fsdp.workers_per_copy(config.trainer.world_size)
    return bucket + part + itemsize * shape.hidden * shape.intermediate + largest / rollout.tensor_parallel_size


def _generating(config: PPOConfig, shape: Shape, gpu_gb: float) -> Parts:
    """Holders of memory of the rollout engine while it samples; none where it has GPUs of its own."""
    rollout = config.rollout
    if rollout.has_pool:
        return {}
    if rollout.name == "hf":
        itemsize = ITEMSIZE[config.model.param_dtype]
        tokens = rollout.max_num_seqs * config.max_sequence_length
        return {
            "whole policy": itemsize * shape.parameters / GB,
            "KV cache": 2 * itemsize * shape.layers * shape.kv * tokens / GB,
            "logits": SAMPLING_BYTES * rollout.max_num_seqs * shape.vocabulary / GB,
        }
    if rollout.kv_cache_memory_mb:
        # vLLM then takes no account of what else needs memory.
        parts = engine_parts(config, shape, gpu_gb)
        held = {"engine": parts["weights"] + parts["KV cache"], "hidden states": parts["hidden states"]}
        return {name: size for name, size in held.items() if size}
    return {"engine": gpu_gb * rollout.gpu_memory_utilization}


def engine_parts(config: PPOConfig, shape: Shape, gpu_gb: float) -> Parts:
    """Parts of vLLM's share, without activations: weights, hidden states with the workspace that measures them, and the
    KV cache, which gets the rest."""
    rollout, itemsize = config.rollout, ENGINE_ITEMSIZE.get(config.rollout.dtype, 2)
    weights = itemsize * shape.parameters / rollout.tensor_parallel_size / GB
    states = reserved_bytes(config.calculator, config.max_sequence_length, shape.hidden, itemsize) / GB
    cache = gpu_gb * rollout.gpu_memory_utilization - weights - states
    if rollout.kv_cache_memory_mb:
        cache = rollout.kv_cache_memory_mb * 2**20 / GB
    return {"weights": weights, "hidden states": states, "KV cache": cache}


def _critic_phases(config: PPOConfig, shape: Shape, resting: Parts) -> dict[str, Parts]:
    """The phases of the update of a critic of this ``shape``, with what is ``resting`` meanwhile."""
    critic = config.critic
    held = Held.of(shape, critic.model, config.trainer.world_size)
    tokens = critic.micro_batch_size_per_gpu * config.max_sequence_length / critic.model.ulysses_sequence_parallel_size
    if critic.use_dynamic_bsz:
        # The limit of one worker, as the actor's.
        tokens = critic.ppo_max_token_len_per_gpu
    activations = shape.activations(tokens, critic.model) / GB
    idle = held.parameters + held.moments * (not critic.model.fsdp.optimizer_offload)
    learning = resting | {"gradients": held.gradients}
    return {
        "critic, backward": learning
        | {"critic": idle, "gathered": held.gathered, "whole gradients": held.reduced, "activations": activations},
        "critic, step": learning | {"critic": held.parameters + held.moments, "temporary": held.gradients},
    }


def shape_of(model: ModelConfig) -> Shape | None:
    """The sizes of a model; None if it is not built as the terms of the estimate assume."""
    info = ModelInfo.of(model)
    try:
        shape, whole = Shape.of(info.text_config), info.causal_model
    except (AttributeError, TypeError, ConfigError):
        return None
    # A mixture of experts, or layers of other kinds, would be mistaken for a much smaller model.
    parameters = sum(parameter.numel() for parameter in whole.parameters())
    return shape if abs(shape.parameters / parameters - 1) < SAME_MODEL else None


def peak_of(phases: Mapping[str, Parts]) -> tuple[str, float]:
    """The phase of an estimate that needs most, and its GB."""
    phase = max(phases, key=lambda name: sum(phases[name].values()))
    return phase, sum(phases[phase].values())


def fix_of(phase: str) -> str:
    """In words, the options that lower a phase's memory."""
    return f"{fix(METHODS.get(phase, 'load'), ON_GPU)}, or train adapters (model.lora.rank=32)"


def memory_warning(config: PPOConfig, gpu_gb: float) -> str:
    """One line if the estimate exceeds 90 % of the smallest GPU's memory; otherwise empty.

    Models whose sizes the estimate does not know are not counted; without the policy's there is no estimate.
    """
    policy = shape_of(config.model)
    if policy is None:
        return ""
    critic = shape_of(config.critic.model) if config.uses_critic else None
    judge = shape_of(config.reward_model.model) if config.uses_reward_model else None
    phases = estimate(config, Shapes(policy, critic, judge), gpu_gb)
    phase, total = peak_of(phases)
    if total <= WARNED * gpu_gb:
        return ""
    largest = sorted(phases[phase].items(), key=lambda part: -part[1])[:3]
    terms = ", ".join(f"{name} {size:.1f}" for name, size in largest)
    return (
        f"warning: {phase}: needs about {total:.1f} GB of a GPU with {gpu_gb:.1f} ({terms}), by the estimate of "
        f"docs/memory.md; if memory runs out: {fix_of(phase)}"
    )
