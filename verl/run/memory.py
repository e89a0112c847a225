"""Estimates the GPU memory of each phase of a training run from its options; docs/memory.md derives the terms.

The estimate covers decoder-only models with gated MLPs (Qwen, Llama, Mistral). Activation sizes are based on the
tensors that autograd saves.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from verl.cluster.failures import ON_GPU, fix
from verl.config.actor import LearnerConfig
from verl.config.common import ModelConfig
from verl.config.errors import ConfigError
from verl.config.ppo import PPOConfig
from verl.models.info import ModelInfo
from verl.rank.calculator import workspace_bytes
from verl.rollout.hidden_states import reserved_bytes

GB = 1e9
CONTEXT_GB = 2.0
"""Estimated size of the CUDA context, kernels and NCCL buffers, assuming one process per GPU."""
LOGITS_BYTES = 12
"""Bytes per token and vocabulary entry besides the logits: log-softmax, probabilities and their product in float32."""
ENTROPY_BYTES = 20
"""Bytes per token and vocabulary entry for backward passes through the entropy, including the logits."""
SAMPLING_BYTES = 32
"""Like ``LOGITS_BYTES``, for sampling with ``rollout.name=hf``: sorted float64 probabilities and their sums."""


SAME_MODEL = 0.05
"""Maximum share of a model's parameters in norms and biases; above it, the estimate does not apply."""
WARNED = 0.9
"""Share of GPU memory above which a run prints a warning, because estimates omit fragmentation and temporaries."""
METHODS = {"generate": "sync_weights", "sync": "sync_weights", "logprobs": "compute_logprobs"}
METHODS |= {"update, backward": "actor.update", "critic, backward": "critic.update"}
"""Phase -> worker method whose suggested fixes apply to it; optimizer steps use the fixes for loading."""

Parts = dict[str, float]
"""Memory component -> size in GB on one GPU."""


def itemsize_of(dtype: str) -> int:
    """Return the bytes per element for ``param_dtype`` or ``rollout.dtype``: 4 for float32, otherwise 2."""
    return 4 if dtype == "float32" else 2


class Shape(NamedTuple):
    """Dimensions of a model."""

    hidden: int
    intermediate: int
    layers: int
    attention: int
    """Number of query heads times the head dimension."""
    kv: int
    """Number of key-value heads times the head dimension."""
    vocabulary: int
    tied: bool

    @classmethod
    def of(cls, config: Any) -> "Shape":
        """Return the dimensions in a ``transformers`` config, or raise ``AttributeError`` if one is missing."""
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        sizes = (config.hidden_size, config.intermediate_size, config.num_hidden_layers)
        heads = (config.num_attention_heads * head, config.num_key_value_heads * head)
        return cls(*sizes, *heads, config.vocab_size, config.tie_word_embeddings)

    @property
    def layer_parameters(self) -> int:
        """Number of parameters in the matrices of one layer, without norms and biases."""
        return self.hidden * (2 * self.attention + 2 * self.kv + 3 * self.intermediate)

    @property
    def root_parameters(self) -> int:
        """Number of parameters in the embedding and the output head."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        """Number of parameters in the model."""
        return self.layers * self.layer_parameters + self.root_parameters

    def trainable(self, model: ModelConfig) -> int:
        """Return the number of parameters that have gradients and moments: only the adapters', or all."""
        if not model.trains_adapters:
            return self.parameters
        d, i = self.hidden, self.intermediate
        # Sum of the input and output sizes of each matrix in a layer.
        linears = {"q_proj": d + self.attention, "k_proj": d + self.kv, "v_proj": d + self.kv}
        linears |= {"o_proj": self.attention + d, "gate_proj": d + i, "up_proj": d + i, "down_proj": i + d}
        chosen = [n for name, n in linears.items() if {name, "all-linear"} & set(model.lora.target_modules)]
        return self.layers * model.lora.rank * sum(chosen)

    def activations(self, tokens: float, model: ModelConfig) -> float:
        """Return the number of bytes saved for the backward pass of a micro-batch of ``tokens`` tokens per worker."""
        scale = itemsize_of(model.param_dtype) / 2
        # Given a padding mask, torch's attention repeats keys and values for every query head.
        keys = self.kv if model.use_remove_padding else self.attention
        layer = scale * (20 * self.hidden + 8 * self.intermediate + 4 * keys)
        if model.gradient_checkpointing:
            return tokens * (2 * scale * self.hidden * self.layers + layer)
        return tokens * layer * self.layers

    def model_parts(self, model: ModelConfig, workers: int, learns: bool = True) -> Parts:
        """Return the memory components of a sharded model.

        FSDP gathers the parameters of the root and two layers, and holds unsharded gradients of the root and one layer.
        """
        shards, itemsize = model.fsdp.workers_per_copy(workers), itemsize_of(model.param_dtype)
        trainable = self.trainable(model) if learns else 0
        reduced = itemsize * self.root_parameters + (itemsize + 4) * self.layer_parameters
        return {
            "parameters": (4 * trainable + itemsize * (self.parameters - trainable)) / shards / GB,
            "gradients": 4 * trainable / shards / GB,
            "moments": 8 * trainable / shards / GB,
            "gathered": itemsize * (self.root_parameters + 2 * self.layer_parameters) / GB,
            "whole gradients": 0.0 if model.trains_adapters else reduced / GB,
        }


def estimate(
    config: PPOConfig,
    gpu_gb: float,
    policy: Shape,
    critic: Shape | None = None,
    reward_model: Shape | None = None,
    teacher: Shape | None = None,
) -> dict[str, Parts]:
    """Return GB on one GPU by phase and component, ignoring a critic, reward model or teacher without a shape."""
    model, actor, rollout, workers = config.model, config.actor, config.rollout, config.trainer.world_size
    longest, longest_response = config.max_sequence_length, config.data.max_response_length
    rows = actor.log_prob_micro_batch_size_per_gpu
    scored_tokens = _micro_batch(actor, rows, actor.log_prob_max_token_len_per_gpu, model, longest)
    learned_tokens = _micro_batch(
        actor, actor.micro_batch_size_per_gpu, actor.ppo_max_token_len_per_gpu, model, longest
    )
    parts, engine = policy.model_parts(model, workers), _engine(config, policy, gpu_gb)
    colocated = {} if rollout.has_pool else engine

    # 1. Memory held in every phase. Individual phases add or replace components.
    held = {"context": CONTEXT_GB}
    if config.uses_reference and not model.trains_adapters:
        reference = policy.model_parts(model, workers, learns=False)
        held["reference"] = 0.0 if config.ref.param_offload else reference["parameters"]
    if reward_model is not None:
        frozen = config.reward_model.model
        scores = reward_model.model_parts(frozen, workers, learns=False)
        held["reward model"] = 0.0 if frozen.fsdp.param_offload else scores["parameters"]
    beside: Parts = {}
    if teacher is not None:
        frozen = config.teacher.model
        parts_of_teacher = teacher.model_parts(frozen, workers, learns=False)
        held["teacher"] = 0.0 if frozen.fsdp.param_offload else parts_of_teacher["parameters"]
        if config.teacher.is_exact:  # both are read in the update
            beside = {"teacher": parts_of_teacher["parameters"], "teacher gathered": parts_of_teacher["gathered"]}
    held |= _idle(parts, model, "")
    if critic is not None:
        critic_parts = critic.model_parts(config.critic.model, workers)
        held |= _idle(critic_parts, config.critic.model, "critic ")
    awake = {} if rollout.free_cache_engine or rollout.name == "hf" else colocated
    at_work = held | {"parameters": parts["parameters"]}

    # 2. The log-probability pass. The head runs after the layers, whose MLPs hold two factors and their product in
    # addition to the residual stream and the attention output.
    def logits(num_bytes: int, tokens: float) -> float:
        responses = tokens * longest_response / longest
        alive = min(model.logits_chunk_size or responses, responses)
        return num_bytes * alive * policy.vocabulary / GB

    itemsize = itemsize_of(model.param_dtype)
    passing = scored_tokens * itemsize * (3 * policy.intermediate + 5 * policy.hidden) / GB
    scoring = {"logits": logits(itemsize + LOGITS_BYTES, scored_tokens), "activations": passing}
    largest = max(scoring, key=lambda part: scoring[part])
    spectra = {}
    if config.calculator.measured_by("actor"):
        sizes = (longest_response, len(config.calculator.layers), policy.hidden)
        spectra["spectra"] = workspace_bytes(*sizes, config.calculator) / GB

    # 3. The phases. Separate engines do not share their GPUs.
    learned = logits(ENTROPY_BYTES if actor.entropy_coeff else itemsize + LOGITS_BYTES, learned_tokens)
    learned *= 3 if beside else 1  # the teacher's logits, and the terms of the divergence
    activations = policy.activations(learned_tokens, model) / GB
    sampling = {"context": CONTEXT_GB} if rollout.has_pool else at_work if rollout.name == "hf" else held
    phases = {
        "generate": sampling | engine,
        "logprobs": at_work | awake | spectra | {"gathered": parts["gathered"], largest: scoring[largest]},
        **_update("update", held | awake | beside, parts, "", {"activations": activations, "logits": learned}),
        "sync": at_work | colocated | {"bucket": _syncing(config, policy) / GB},
    }
    if rollout.name == "hf":
        del phases["sync"]
    if critic is not None:
        options = config.critic
        limits = (options.micro_batch_size_per_gpu, options.ppo_max_token_len_per_gpu)
        activations = critic.activations(_micro_batch(options, *limits, options.model, longest), options.model) / GB
        phases |= _update("critic", held | awake, critic_parts, "critic ", {"activations": activations})
    return phases


def _micro_batch(options: LearnerConfig, rows: int, most: int, model: ModelConfig, longest: int) -> float:
    """Return the number of tokens in a micro-batch on one worker, which is ``most`` with ``use_dynamic_bsz``."""
    return most if options.use_dynamic_bsz else rows * longest / model.ulysses_sequence_parallel_size


def _idle(parts: Parts, model: ModelConfig, prefix: str) -> Parts:
    """Return the memory that a model occupies while other models are in use."""
    offloaded = {"parameters": model.fsdp.param_offload, "moments": model.fsdp.optimizer_offload}
    return {f"{prefix}{name}": 0.0 if off else parts[name] for name, off in offloaded.items()}


def _update(name: str, held: Parts, parts: Parts, prefix: str, batch: Parts) -> dict[str, Parts]:
    """Return the memory of the phases of a model's update: the backward pass and the optimizer step.

    AdamW's step over all parameters allocates a temporary of their size.
    """
    learning = held | {f"{prefix}parameters": parts["parameters"], "gradients": parts["gradients"]}
    whole = {name: parts[name] for name in ("gathered", "whole gradients")}
    step = {f"{prefix}moments": parts["moments"], "temporary": parts["gradients"]}
    return {f"{name}, backward": learning | whole | batch, f"{name}, step": learning | step}


def _syncing(config: PPOConfig, shape: Shape) -> float:
    """Return the bytes that a weight sync uses: a bucket, its part on this worker, a whole parameter, vLLM's copy."""
    rollout, itemsize = config.rollout, itemsize_of(config.rollout.dtype)
    largest = itemsize * shape.vocabulary * shape.hidden
    bucket = min(max(rollout.update_weights_bucket_megabytes << 20, largest), itemsize * shape.parameters)
    part = bucket / config.model.fsdp.workers_per_copy(config.trainer.world_size)
    return bucket + part + itemsize * shape.hidden * shape.intermediate + largest / rollout.tensor_parallel_size


def _engine(config: PPOConfig, shape: Shape, gpu_gb: float) -> Parts:
    """Return the memory components of the rollout engine during sampling.

    vLLM's KV cache takes the engine's share minus its weights, the hidden states and the workspace for measuring them.
    """
    rollout, length = config.rollout, config.max_sequence_length
    if rollout.name == "hf":
        itemsize = itemsize_of(config.model.param_dtype)
        return {
            "whole policy": itemsize * shape.parameters / GB,
            "KV cache": 2 * itemsize * shape.layers * shape.kv * rollout.max_num_seqs * length / GB,
            "logits": SAMPLING_BYTES * rollout.max_num_seqs * shape.vocabulary / GB,
        }
    itemsize = itemsize_of(rollout.dtype)
    weights = itemsize * shape.parameters / rollout.tensor_parallel_size / GB
    states = reserved_bytes(config.calculator, length, shape.hidden, itemsize) / GB
    cache = gpu_gb * rollout.gpu_memory_utilization - weights - states
    if rollout.kv_cache_memory_mb:
        # With an explicit size, vLLM ignores other memory needs.
        cache = rollout.kv_cache_memory_mb * 2**20 / GB
    return {"engine weights": weights, "hidden states": states, "KV cache": cache}


def shape_of(model: ModelConfig) -> Shape | None:
    """Return the dimensions of a model, or None if the estimate does not apply to its architecture."""
    info = ModelInfo.of(model)
    try:
        shape, whole = Shape.of(info.text_config), info.causal_model
    except (AttributeError, TypeError, ConfigError):
        return None
    # A mixture of experts or an unusual layer type would look like a much smaller model.
    parameters = sum(parameter.numel() for parameter in whole.parameters())
    return shape if abs(shape.parameters / parameters - 1) < SAME_MODEL else None


def peak_of(phases: Mapping[str, Parts]) -> tuple[str, float]:
    """Return the phase that needs the most memory and its total in GB."""
    phase = max(phases, key=lambda name: sum(phases[name].values()))
    return phase, sum(phases[phase].values())


def fix_of(phase: str) -> str:
    """Return a text with the options that reduce the memory of a phase."""
    return f"{fix(METHODS.get(phase, 'load'), ON_GPU)}, or train adapters (model.lora.rank=32)"


def memory_warning(config: PPOConfig, gpu_gb: float) -> str:
    """Return a warning if the estimate exceeds 90 % of the smallest GPU's memory, or an empty string otherwise.

    A critic, reward model or teacher of unknown size is ignored; if the policy's size is unknown, there is no estimate.
    """
    policy = shape_of(config.model)
    if policy is None:
        return ""
    critic = shape_of(config.critic.model) if config.uses_critic else None
    reward_model = shape_of(config.reward_model.model) if config.uses_reward_model else None
    teacher = shape_of(config.teacher.model) if config.teacher.loads_model else None
    phases = estimate(config, gpu_gb, policy, critic, reward_model, teacher)
    phase, total = peak_of(phases)
    if total <= WARNED * gpu_gb:
        return ""
    largest = sorted(phases[phase].items(), key=lambda part: -part[1])[:3]
    terms = ", ".join(f"{name} {size:.1f}" for name, size in largest)
    return (
        f"warning: {phase}: needs about {total:.1f} GB of a GPU with {gpu_gb:.1f} ({terms}), by the estimate of "
        f"docs/memory.md; if memory runs out: {fix_of(phase)}"
    )
