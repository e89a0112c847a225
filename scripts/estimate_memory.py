"""Estimate what a training run takes on each GPU, phase by phase; docs/memory.md derives the terms.

python scripts/estimate_memory.py --gpu-gb 80 preset=paper experiment=verl_grpo model=qwen2.5_7b trainer=gpus8

Arguments are those of train.sh. Only the model's config.json is read; nothing runs. For decoder-only models with gated
MLPs (Qwen, Llama, Mistral), whose activations were counted from the tensors that autograd saves.
"""

import argparse
import sys
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from verl.config import PPOConfig, load_config
from verl.config.common import ModelConfig
from verl.config.load import ConfigError
from verl.data.model_files import model_config

GB = 1e9
CONTEXT_GB = 2.0
"""CUDA context, kernels and NCCL's buffers; a guess that holds for one process per GPU."""
LOGITS_BYTES = {"forward": 10, "backward": 16}
"""Per token and word of the vocabulary: logits in bfloat16 and float32, their log-softmax, and gradients of these."""

Parts = dict[str, float]
"""What holds memory -> GB on one GPU."""


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
        """From a ``transformers`` config."""
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        sizes = (config.hidden_size, config.intermediate_size, config.num_hidden_layers)
        heads = (config.num_attention_heads * head, config.num_key_value_heads * head)
        return cls(*sizes, *heads, config.vocab_size, config.tie_word_embeddings)

    @property
    def linears(self) -> dict[str, int]:
        """Inputs plus outputs of a layer's matrices."""
        d, i = self.hidden, self.intermediate
        attention = {"q_proj": d + self.attention, "k_proj": d + self.kv, "v_proj": d + self.kv}
        return attention | {"o_proj": self.attention + d, "gate_proj": d + i, "up_proj": d + i, "down_proj": i + d}

    @property
    def layer_parameters(self) -> int:
        """Of the matrices of one layer; norms and biases do not count."""
        return self.hidden * (2 * self.attention + 2 * self.kv + 3 * self.intermediate)

    @property
    def root_parameters(self) -> int:
        """Embedding and head."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.root_parameters

    def trainable(self, model: ModelConfig) -> int:
        """Parameters that have gradients and moments: all, or those of the adapters."""
        lora = model.lora
        if not lora.rank:
            return self.parameters
        chosen = [n for name, n in self.linears.items() if {name, "all-linear"} & set(lora.target_modules)]
        return self.layers * lora.rank * sum(chosen)

    def activations(self, tokens: float, model: ModelConfig) -> float:
        """Bytes that the backward pass finds saved, for a micro-batch of so many tokens on this worker."""
        scale = {"bfloat16": 1, "float32": 2}[model.param_dtype]
        layer = scale * (20 * self.hidden + 8 * self.intermediate + 4 * self.kv)
        if model.gradient_checkpointing:
            return tokens * (2 * scale * self.hidden * self.layers + layer)
        return tokens * layer * self.layers


class Held(NamedTuple):
    """A model on one GPU, in GB."""

    parameters: float
    gradients: float
    moments: float
    gathered: float
    """The root's and two layers' parameters, whole, in the precision of products."""
    reduced: float
    """The root's gradients, and one layer's on their way to the shards."""

    @classmethod
    def of(cls, shape: Shape, model: ModelConfig, workers: int) -> "Held":
        shards = workers if model.fsdp.fsdp_size == -1 else model.fsdp.fsdp_size
        itemsize = {"bfloat16": 2, "float32": 4}[model.param_dtype]
        trainable = shape.trainable(model)
        whole = not model.lora.rank
        return cls(
            4 * shape.parameters / shards / GB,
            4 * trainable / shards / GB,
            8 * trainable / shards / GB,
            itemsize * (shape.root_parameters + 2 * shape.layer_parameters) / GB,
            (itemsize * shape.root_parameters + (itemsize + 4) * shape.layer_parameters) / GB if whole else 0.0,
        )

    def idle(self, param_offload: bool, optimizer_offload: bool) -> float:
        """While others work."""
        return self.parameters * (not param_offload) + self.moments * (not optimizer_offload)


def estimate(config: PPOConfig, shape: Shape, gpu_gb: float) -> dict[str, Parts]:
    """GB on one GPU by phase and by what holds it; the critic and the reference have the policy's shape."""
    model, workers = config.model, config.trainer.world_size
    fsdp, parallel = model.fsdp, model.ulysses_sequence_parallel_size
    policy = Held.of(shape, model, workers)
    longest = config.data.max_prompt_length + config.data.max_response_length
    update = config.actor.micro_batch_size_per_gpu * longest / parallel
    forward = config.actor.log_prob_micro_batch_size_per_gpu * longest / parallel
    if config.actor.use_dynamic_bsz:
        # Of one worker: the workers that share sequences take so many times that.
        update, forward = config.actor.ppo_max_token_len_per_gpu, config.actor.log_prob_max_token_len_per_gpu

    others: Parts = {}
    if config.uses_reference and not model.lora.rank:
        others["reference"] = 0.0 if config.ref.param_offload else policy.parameters
    if config.uses_critic:
        critic = config.critic.model
        held = Held.of(shape, critic, workers)
        others["critic"] = held.idle(critic.fsdp.param_offload, critic.fsdp.optimizer_offload)
    others["context"] = CONTEXT_GB
    engine = gpu_gb * config.rollout.gpu_memory_utilization
    sleeping = {} if config.rollout.free_cache_engine else {"engine": engine}
    moments = 0.0 if fsdp.optimizer_offload else policy.moments

    def logits(kind: str, tokens: float) -> float:
        responses = tokens * config.data.max_response_length / longest
        alive = min(model.logits_chunk_size or responses, responses)
        return LOGITS_BYTES[kind] * alive * shape.vocabulary / GB

    at_work = {"parameters": policy.parameters, "moments": moments, **others}
    resting = at_work | {"parameters": 0.0 if fsdp.param_offload else policy.parameters}
    learning = at_work | {"gradients": policy.gradients}
    activations = shape.activations(update, model) / GB
    largest = 4 * shape.vocabulary * shape.hidden / GB
    return {
        "generate": resting | {"engine": engine},
        "logprobs": at_work | sleeping | {"gathered": policy.gathered, "logits": logits("forward", forward)},
        "update, backward": learning
        | sleeping
        | {"gathered": policy.gathered, "whole gradients": policy.reduced, "activations": activations}
        | {"logits": logits("backward", update)},
        # AdamW's step over all parameters at once makes a temporary of their size.
        "update, step": learning | sleeping | {"moments": policy.moments, "temporary": policy.gradients},
        "sync": at_work | {"engine": engine, "one parameter": largest},
    }


def main(argv: list[str]) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu-gb", type=float, default=80.0, help="memory of one GPU, 10^9 bytes")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides of the main job")
    options = parser.parse_args(argv)
    try:
        config = load_config(PPOConfig, "ppo_trainer", options.overrides)
        model = config.model
        shape = Shape.of(model_config(model.path, model.trust_remote_code))
    except ConfigError as error:
        sys.exit(f"error: {error}")
    phases = estimate(config, shape, options.gpu_gb)
    names = list(dict.fromkeys(name for parts in phases.values() for name in parts))
    title = f"GB on each of {config.trainer.world_size} GPUs of {options.gpu_gb:g}: {model.path}, "
    table = Table("", *phases, title=title + f"{shape.parameters / GB:.2f} billion parameters", title_justify="left")
    for name in names:
        table.add_row(name, *(f"{parts[name]:.1f}" if name in parts else "" for parts in phases.values()))
    table.add_row("in all", *(f"{sum(parts.values()):.1f}" for parts in phases.values()))
    console = Console()
    console.print(table)
    worst = max(phases, key=lambda name: sum(phases[name].values()))
    total = sum(phases[worst].values())
    console.print(f"{worst}: {total:.1f} GB; {'fits' if total <= options.gpu_gb else 'does not fit'}", highlight=False)


if __name__ == "__main__":
    main(sys.argv[1:])
