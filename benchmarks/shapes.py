"""The models that are measured: sizes of Qwen2, and the embedded one with responses of a fixed length."""

import json
import shutil
from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

EMBEDDED = Path(__file__).resolve().parents[1] / "data" / "tiny_model"

SHAPES = {
    "1.5b": {"hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2}
    | {"intermediate_size": 8960, "vocab_size": 151936, "tie_word_embeddings": True},
    "20m": {"hidden_size": 384, "num_hidden_layers": 8, "num_attention_heads": 6, "num_key_value_heads": 2}
    | {"intermediate_size": 1536, "vocab_size": 8192, "tie_word_embeddings": True},
    "tiny": {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    | {"intermediate_size": 384, "vocab_size": 256, "tie_word_embeddings": True},
}
"""Qwen2 models: Qwen2.5-1.5B; one large enough that a CPU's time goes into the model; the embedded task's."""


def make_model(shape: str, folder: Path, embedded: Path = EMBEDDED) -> None:
    """Save a random model of ``SHAPES``, or the ``embedded`` one; a token that it never samples ends a response."""
    tokenizer = AutoTokenizer.from_pretrained(embedded)
    end = tokenizer.pad_token_id
    if shape == "embedded":
        shutil.copytree(embedded, folder)
        for name in ("config.json", "generation_config.json"):
            values = json.loads((folder / name).read_text())
            (folder / name).write_text(json.dumps(values | {"eos_token_id": end}))
    else:
        torch.manual_seed(0)
        config = Qwen2Config(**SHAPES[shape], max_position_embeddings=4096, eos_token_id=end, pad_token_id=end)
        Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.eos_token = tokenizer.pad_token
    tokenizer.save_pretrained(folder)
