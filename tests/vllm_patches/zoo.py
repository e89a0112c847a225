"""Tiny random decoders of several architectures, and the hidden states that transformers computes for them.

Tests of the capture run vLLM on these models and compare. They have no tokenizer: vLLM is started with
``skip_tokenizer_init=True`` and prompted with ``prompt_token_ids``. None names an end-of-sequence token.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

COMMON: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,  # the smallest that vLLM's attention takes on CPU
    "max_position_embeddings": 512,
    # At 0.1 greedy tokens repeat; at 0.2 states grow to 40, and float32 noise in them nears 1e-4.
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "dtype": "float32",
}
"""Options of every model's config."""

GEMMA: dict[str, Any] = {
    "sliding_window": 32,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "initializer_range": 0.2,  # norms after each block keep states small
    "tie_word_embeddings": True,  # vLLM runs no other Gemma 2
}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gemma2": GEMMA,
    "gemma3_text": GEMMA,
    # Scales other than 1, which is what they are by default.
    "glm4": {"eos_token_id": 2},  # None would be replaced by the default, which is larger than the vocabulary
    "granite": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.25,
        "logits_scaling": 2.0,
    },
    "llama": {},
    "mistral": {"sliding_window": 32},
    "mixtral": {"num_local_experts": 4},
    "olmo2": {},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "phi3": {},
    "qwen2": {},
    "qwen3": {},
    "smollm3": {},
    "starcoder2": {},
    "gpt_oss": {"num_local_experts": 4},
    "glm4_moe": {
        "moe_intermediate_size": 128,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    },
    "ernie4_5": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
}
"""``{model type in transformers: options of its config besides the common ones}``."""

WITHOUT_INTERMEDIATE_LAYERS = {"gemma2", "gemma3_text", "glm4", "glm4_moe", "mixtral", "olmoe"}
"""Architectures that give vLLM 0.32 the last layer alone."""

WITHOUT_WEIGHT_SYNC = {"gpt_oss"}
"""Architectures whose weights vLLM 0.32 does not replace rightly."""

WITHOUT_NATIVE_CLASS = {"olmo2", "smollm3", "starcoder2"}
"""Architectures that vLLM 0.32 runs through the class of transformers."""


def build(name: str, folder: Path, **changes: Any) -> Path:
    """Write the model ``name`` of ``ARCHITECTURES``, config and weights, to ``folder``; always the same model.

    ``changes``: of its config.

    vLLM runs olmo2, and with ``model_impl="transformers"`` any of them, through the class in transformers, and patches
    that class. The process can make no further model of it: build and load before the engine starts.
    """
    config = AutoConfig.for_model(name, **COMMON | ARCHITECTURES[name] | changes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # Biases and norms start as constants, and a test would not miss them.
                parameter += 0.2 * torch.randn_like(parameter)
        if config.tie_word_embeddings:
            # A tied head finds in the state the token just read and repeats it. Gemma scales by 1 + weight: mean 0.
            model.model.norm.weight.normal_(mean=-1)
    model.save_pretrained(folder)
    return folder


def load(folder: Path) -> PreTrainedModel:
    """The model in ``folder``, for ``reference_states``; usable whether or not vLLM patches its class later."""
    # In transformers, sdpa leaves out the soft cap of Gemma 2's attention.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.model.do_not_compile = True  # what vLLM's patched class looks for in every instance
    return model


@torch.no_grad()
def reference_states(model: PreTrainedModel, token_ids: Sequence[int], layers: Sequence[int]) -> Tensor:
    """Hidden states of one sequence after each of ``layers``, float32.

    Layer k >= 0 is the output of decoder layer k, ``hidden_states[k + 1]`` in transformers; a negative k counts from
    the end, ``hidden_states[k]``. The last entry there is the state after the final norm, so that -1 and the index of
    the last decoder layer name the same state; no index names that layer's output before the norm.

    Args:
        model: From ``load``.
        token_ids: The sequence, T tokens.
        layers: Indices from -(L + 1), the embedding, to L - 1, for L decoder layers.

    Returns:
        ``[T, len(layers), hidden]``.
    """
    states = model(torch.tensor([token_ids]), output_hidden_states=True, use_cache=False).hidden_states
    return torch.cat([states[k + 1 if k >= 0 else k] for k in layers]).transpose(0, 1)
