"""Estimates the GPU memory of each phase of a training run from its options. See docs/memory.md for derivations.

The estimate covers decoder-only models with gated MLPs (Qwen, Llama, Mistral). Activation sizes are based on the
tensors that autograd saves.
"""

from collections.abc import Mapping

from transformers import PretrainedConfig

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
LOGITS_BYTES, ENTROPY_BYTES, SAMPLING_BYTES = 12, 20, 32
"""Memory for logits in bytes per token and vocabulary entry. ``LOGITS_BYTES``: log-softmax, probabilities and their
product in float32, in addition to the logits. ``ENTROPY_BYTES``: backward passes through the entropy, including the
logits. ``SAMPLING_BYTES``: sorted float64 probabilities and their sums if ``rollout.name=hf`` samples."""

SAME_MODEL = 0.05
"""Maximum fraction of parameters in norms and biases for which the memory estimate is used."""
WARNED = 0.9
"""Fraction of GPU memory above which a warning is printed. Estimates omit fragmentation and temporaries."""
METHODS = {"generate": "sync_weights", "sync": "sync_weights", "logprobs": "compute_logprobs"}
METHODS |= {"update, backward": "actor.update", "critic, backward": "critic.update"}
"""Maps each phase to the worker method whose suggested fixes apply. Optimizer steps use the fixes for loading."""

Parts = dict[str, float]
"""Maps each memory component to its size in GB on one GPU."""


def itemsize_of(dtype: str) -> int:
    """Return the number of bytes per element of ``param_dtype`` or ``rollout.dtype``: 4 for float32, otherwise 2."""
    return 4 if dtype == "float32" else 2


def matrices_of(shape: PretrainedConfig) -> dict[str, tuple[int, int]]:
    """Return the input and output size of each matrix in a layer."""
    d, i = shape.hidden_size, shape.intermediate_size
    head = getattr(shape, "head_dim", None) or d // shape.num_attention_heads
    q, kv = head * shape.num_attention_heads, head * shape.num_key_value_heads
    attention = {"q_proj": (d, q), "k_proj": (d, kv), "v_proj": (d, kv), "o_proj": (q, d)}
    return attention | {"gate_proj": (d, i), "up_proj": (d, i), "down_proj": (i, d)}


def parameters_of(shape: PretrainedConfig) -> tuple[int, int, int]:
    """Return the number of parameters of the model, of its root (embedding and output head), and of one layer."""
    root = shape.vocab_size * shape.hidden_size * (1 if shape.tie_word_embeddings else 2)
    layer = sum(rows * columns for rows, columns in matrices_of(shape).values())
    return root + shape.num_hidden_layers * layer, root, layer


def activations_of(shape: PretrainedConfig, tokens: float, model: ModelConfig) -> float:
    """Return the size in GB of the activations saved for the backward pass of ``tokens`` tokens per worker."""
    scale, d, layers = itemsize_of(model.param_dtype) / 2, shape.hidden_size, shape.num_hidden_layers
    # Given a padding mask, torch's attention repeats keys and values for every query head.
    keys = matrices_of(shape)["k_proj" if model.use_remove_padding else "q_proj"][1]
    layer: float = scale * (20 * d + 8 * shape.intermediate_size + 4 * keys)
    saved: float = 2 * scale * d * layers + layer if model.gradient_checkpointing else layer * layers
    return tokens * saved / GB


def parts_of(shape: PretrainedConfig, model: ModelConfig, workers: int, learns: bool) -> Parts:
    """Return the memory components of a sharded model.

    FSDP gathers the parameters of the root and two layers, and holds unsharded gradients of the root and one layer.
    """
    shards, itemsize = model.fsdp.workers_per_copy(workers), itemsize_of(model.param_dtype)
    parameters, root, layer = parameters_of(shape)  # without norms and biases
    trainable = parameters if learns else 0
    if learns and model.trains_adapters:
        targets = set(model.lora.target_modules)
        chosen = [sum(size) for name, size in matrices_of(shape).items() if {name, "all-linear"} & targets]
        trainable = shape.num_hidden_layers * model.lora.rank * sum(chosen)
    return {
        "parameters": (4 * trainable + itemsize * (parameters - trainable)) / shards / GB,
        "gradients": 4 * trainable / shards / GB,
        "moments": 8 * trainable / shards / GB,
        "gathered": itemsize * (root + 2 * layer) / GB,
        "whole gradients": 0.0 if model.trains_adapters else (itemsize * root + (itemsize + 4) * layer) / GB,
    }


def estimate(config: PPOConfig, gpu_gb: float, shapes: Mapping[str, PretrainedConfig]) -> dict[str, Parts]:
    """Estimate GPU memory (GB) by phase and component. ``shapes`` has keys of ``config.models``, at least ``model``."""
    model, actor, rollout, longest = config.model, config.actor, config.rollout, config.max_sequence_length
    policy, learners = shapes["model"], {"model": "", "critic.model": "critic "}
    workers, models = config.trainer.world_size, config.models
    parts = {name: parts_of(shape, models[name], workers, name in learners) for name, shape in shapes.items()}
    engine, responses = _engine(config, policy, gpu_gb), config.data.max_response_length / longest

    # 1. Memory held in every phase. Individual phases add or replace components.
    held, beside = {"context": CONTEXT_GB}, {}
    if config.uses_reference and not model.trains_adapters:
        reference = parts_of(policy, model, workers, learns=False)
        held["reference"] = 0.0 if config.ref.param_offload else reference["parameters"]
    for name, shares in parts.items():
        fsdp, label = models[name].fsdp, name.removesuffix(".model").replace("_", " ")
        prefix = learners.get(name)
        held[label if prefix is None else f"{prefix}parameters"] = 0.0 if fsdp.param_offload else shares["parameters"]
        if prefix is not None:
            held[f"{prefix}moments"] = 0.0 if fsdp.optimizer_offload else shares["moments"]
    teacher = parts["model"] if config.teacher.is_average else parts.get("teacher.model")
    if teacher and config.teacher.is_average:
        held["teacher"] = 0.0 if config.teacher.model.fsdp.param_offload else teacher["parameters"]
    if teacher and config.teacher.is_exact:  # both are read in the update
        beside = {"teacher": teacher["parameters"], "teacher gathered": teacher["gathered"]}
    at_work = held | {"parameters": parts["model"]["parameters"]}
    colocated = {} if rollout.has_pool else engine
    awake = {} if rollout.free_cache_engine or rollout.name == "hf" else colocated

    # 2. The log-probability pass. The head runs after the layers, whose MLPs hold two factors and their product in
    # addition to the residual stream and the attention output.
    def micro_batch(options: LearnerConfig, rows: int, most: int, model: ModelConfig) -> float:
        return most if options.use_dynamic_bsz else rows * longest / model.ulysses_sequence_parallel_size

    def logits(num_bytes: int, tokens: float) -> float:
        alive = min(model.logits_chunk_size or tokens * responses, tokens * responses)
        return num_bytes * alive * int(policy.vocab_size) / GB

    itemsize = itemsize_of(model.param_dtype)
    tokens = micro_batch(actor, actor.log_prob_micro_batch_size_per_gpu, actor.log_prob_max_token_len_per_gpu, model)
    passing = tokens * itemsize * (3 * policy.intermediate_size + 5 * policy.hidden_size) / GB
    alive = {"logits": logits(itemsize + LOGITS_BYTES, tokens), "activations": passing}
    largest = max(alive, key=lambda part: alive[part])
    scoring = {"gathered": parts["model"]["gathered"], largest: alive[largest]}
    if config.calculator.measured_by("actor"):
        sizes = (config.data.max_response_length, len(config.calculator.layers), policy.hidden_size)
        scoring["spectra"] = workspace_bytes(*sizes, config.calculator) / GB

    # 3. The updates. AdamW's step over all parameters allocates a temporary of their size.
    def update(phase: str, name: str, options: LearnerConfig, more: Parts) -> dict[str, Parts]:
        shares, prefix, learner = parts[name], learners[name], models[name]
        tokens = micro_batch(options, options.micro_batch_size_per_gpu, options.ppo_max_token_len_per_gpu, learner)
        batch = {"activations": activations_of(shapes[name], tokens, learner)}
        if name == "model":
            learned = logits(ENTROPY_BYTES if actor.entropy_coeff else itemsize + LOGITS_BYTES, tokens)
            # The teacher's logits and the terms of the divergence also need memory.
            batch["logits"] = learned * (3 if config.teacher.is_exact else 1)
        gathered = {part: shares[part] for part in ("gathered", "whole gradients")}
        learning = held | awake | more | {f"{prefix}parameters": shares["parameters"], "gradients": shares["gradients"]}
        step = {f"{prefix}moments": shares["moments"], "temporary": shares["gradients"]}
        return {f"{phase}, backward": learning | gathered | batch, f"{phase}, step": learning | step}

    # 4. All phases. Separate engines do not share their GPUs.
    sampling = {"context": CONTEXT_GB} if rollout.has_pool else at_work if rollout.name == "hf" else held
    phases = {"generate": sampling | engine, "logprobs": at_work | awake | scoring}
    phases |= update("update", "model", actor, beside)
    judge = config.reward_score.judge
    if judge.is_frozen:
        phases["judge"] = held | {"judge": judge.model.gpu_memory_utilization * gpu_gb}
    if rollout.name != "hf":
        phases["sync"] = at_work | colocated | {"bucket": _syncing(config, policy) / GB}
    return phases | (update("critic", "critic.model", config.critic, {}) if "critic.model" in shapes else {})


def _syncing(config: PPOConfig, shape: PretrainedConfig) -> float:
    """Return the bytes for a weight sync: a bucket, this worker's shard of it, one full parameter, and vLLM's copy."""
    rollout, itemsize = config.rollout, itemsize_of(config.rollout.dtype)
    largest: int = itemsize * shape.vocab_size * shape.hidden_size
    bucket = min(max(rollout.update_weights_bucket_megabytes << 20, largest), itemsize * parameters_of(shape)[0])
    part = bucket / config.model.fsdp.workers_per_copy(config.trainer.world_size)
    matrix: int = itemsize * shape.hidden_size * shape.intermediate_size
    return bucket + part + matrix + largest / rollout.tensor_parallel_size


def _engine(config: PPOConfig, shape: PretrainedConfig, gpu_gb: float) -> Parts:
    """Return the memory components of the rollout engine during sampling. The KV cache uses the remaining memory."""
    rollout, length, hf = config.rollout, config.max_sequence_length, config.rollout.name == "hf"
    itemsize = itemsize_of(config.model.param_dtype if hf else rollout.dtype)
    weights = itemsize * parameters_of(shape)[0] / GB
    if hf:
        values = shape.num_hidden_layers * matrices_of(shape)["k_proj"][1] * rollout.max_num_seqs * length
        logits = SAMPLING_BYTES * rollout.max_num_seqs * shape.vocab_size / GB
        return {"whole policy": weights, "KV cache": 2 * itemsize * values / GB, "logits": logits}
    weights /= rollout.tensor_parallel_size
    states = reserved_bytes(config.calculator, length, shape.hidden_size, itemsize) / GB
    cache = gpu_gb * rollout.gpu_memory_utilization - weights - states
    cache = rollout.kv_cache_memory_mb * 2**20 / GB if rollout.kv_cache_memory_mb else cache
    return {"engine weights": weights, "hidden states": states, "KV cache": cache}


def shape_of(model: ModelConfig) -> PretrainedConfig | None:
    """Return a model's ``transformers`` config, or None if the estimate does not apply to its architecture."""
    info = ModelInfo.of(model)
    try:
        estimated, whole = parameters_of(info.text_config)[0], info.causal_model
    except (AttributeError, TypeError, ConfigError):
        return None
    # A mixture of experts or an unusual layer type would look like a much smaller model.
    parameters = sum(parameter.numel() for parameter in whole.parameters())
    return info.text_config if abs(estimated / parameters - 1) < SAME_MODEL else None


def peak_of(phases: Mapping[str, Parts]) -> tuple[str, float, str]:
    """Return the phase that needs the most memory, its total in GB, and the options that reduce it."""
    phase = max(phases, key=lambda name: sum(phases[name].values()))
    if phase == "judge":
        return phase, sum(phases[phase].values()), "lower reward_score.judge.model.gpu_memory_utilization"
    options = f"{fix(METHODS.get(phase, 'load'), ON_GPU)}, or train adapters (model.lora.rank=32)"
    return phase, sum(phases[phase].values()), options


def memory_warning(config: PPOConfig, gpu_gb: float) -> str:
    """Return a warning if the estimate exceeds 90 % of the smallest GPU's memory, or an empty string otherwise."""
    # Models of unknown size are ignored.
    shapes = {name: shape for name, model in config.models.items() if (shape := shape_of(model))}
    if "model" not in shapes:
        return ""
    phases = estimate(config, gpu_gb, shapes)
    phase, total, options = peak_of(phases)
    if total <= WARNED * gpu_gb:
        return ""
    largest = sorted(phases[phase].items(), key=lambda part: -part[1])[:3]
    terms = ", ".join(f"{name} {size:.1f}" for name, size in largest)
    return (
        f"warning: {phase}: needs about {total:.1f} GB of a GPU with {gpu_gb:.1f} ({terms}), by the estimate of "
        f"docs/memory.md; if memory runs out: {options}"
    )
