"""Options of models that are refused before workers start. Loading itself is met in test_sharding.py."""

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from safetensors.torch import save_file
from transformers import (
    FalconConfig,
    Gemma2Config,
    Gemma3Config,
    GPT2Config,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen2Config,
    T5Config,
)

from verl.config.common import LoraConfig, ModelConfig
from verl.config.errors import ConfigError
from verl.models import checks
from verl.models.checks import check_model

SIZES = {"vocab_size": 16, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
MODELS: dict[str, PreTrainedConfig] = {
    "qwen2": Qwen2Config(**SIZES, intermediate_size=8),
    "mixed layers": Qwen2Config(**SIZES, layer_types=["full_attention", "linear_attention", "full_attention"]),
    "gemma2": Gemma2Config(**SIZES, intermediate_size=8, head_dim=8, attn_logit_softcapping=0.5),
    "gpt2": GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=16),
    "falcon": FalconConfig(**SIZES),
    "gemma3": Gemma3Config(),
    "qwen2_5_vl": Qwen2_5_VLConfig(),
    "t5": T5Config(),
}
FLASH2, FLASH3 = ({"attn_implementation": f"flash_attention_{version}"} for version in (2, 3))
PACKED = {"use_remove_padding": True}
SHARED_BY_3 = PACKED | {"ulysses_sequence_parallel_size": 3}
LIGER, FLOAT32 = {"use_liger": True}, {"param_dtype": "float32"}


def lora(*targets: str) -> dict[str, LoraConfig]:
    return {"lora": LoraConfig(rank=4, alpha=8.0, target_modules=list(targets), dropout=0.0)}


@pytest.fixture
def check(model_config: ModelConfig, tmp_path: Path):
    def check(model: str, changes: dict[str, object], device_type: str = "cpu") -> None:
        MODELS[model].save_pretrained(tmp_path)
        save_file({}, tmp_path / "model.safetensors")
        check_model(replace(model_config, path=str(tmp_path), **changes), "critic.model", device_type)

    return check


def test_an_empty_package_is_not_a_kernel(check, monkeypatch, tmp_path: Path):
    package = tmp_path / "site"
    package.mkdir()
    (package / "flash_attn_interface.py").write_text('"""A placeholder."""\n')
    monkeypatch.syspath_prepend(package)
    half = FLASH3 | {"param_dtype": "bfloat16"}
    with pytest.raises(
        ConfigError, match="flash-attn-3 is not installed; .* or set it to sdpa, which needs no package$"
    ):
        check("qwen2", half, "cuda")
    (package / "flash_attn_interface.py").write_text("def flash_attn_varlen_func(): ...\n")
    check("qwen2", half, "cuda")


def test_what_a_model_supports_is_accepted(check):
    adapted = lora("q_proj", "down_proj") | {"gradient_checkpointing": True}
    for changes in ({}, adapted, lora("all-linear"), PACKED | {"ulysses_sequence_parallel_size": 4}):
        check("qwen2", changes)
    check("gemma2", {"attn_implementation": "eager"})


NO_LAYERS = "Qwen2ForCausalLM has no linear layers called c_attn, lm_head"
LAYERS = "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
MULTIMODAL = r"is a multimodal checkpoint \(text and vision\), and only text models are trained, .*; name a text model"
SOFT_CAP = r"does not support the soft cap on attention scores of gemma2 \(attn_logit_softcapping=0.5\)"


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        ("qwen2", lora("q_proj", "c_attn", "lm_head"), rf"lora\.target_modules=.*: {NO_LAYERS}; it has {LAYERS}$"),
        ("gpt2", lora("all-linear"), r"lora\..*: GPT2LMHeadModel has no linear layers called all-linear; it has none$"),
        ("qwen2", LIGER, "use_liger=True: runs on GPUs only; set it to false$"),
        ("qwen2", FLASH2, "attn_implementation='flash_attention_2': runs on GPUs only; set it to sdpa$"),
        ("qwen2", FLASH3, "attn_implementation='flash_attention_3': runs on GPUs only; set it to sdpa$"),
        ("gemma2", {}, rf"attn_implementation='sdpa': {SOFT_CAP}; set it to eager or flash_attention_2$"),
        ("qwen2", SHARED_BY_3, "ulysses_sequence_parallel_size=3: must divide the 4 attention heads"),
        ("mixed layers", PACKED, r"use_remove_padding=true: qwen2 at .* has layers of kind \['linear_attention'\]"),
        ("gemma3", {}, rf"path='.*': gemma3 {MULTIMODAL}"),
        ("qwen2_5_vl", {}, rf"path='.*': qwen2_5_vl {MULTIMODAL}"),
        ("falcon", PACKED, "use_remove_padding=true: falcon at .* has its own attention function"),
    ],
)
def test_what_a_model_or_a_cpu_does_not_support_is_refused(check, model, changes, message):
    with pytest.raises(ConfigError, match=rf"^critic\.model\.{message}"):
        check(model, changes)


@pytest.mark.parametrize(
    ("changes", "installed", "message"),
    [
        (LIGER, False, "use_liger=True: liger-kernel is not installed; `pip install liger-kernel`, or set"),
        (FLASH2, False, "attn_impl.*_2': flash-attn is not installed; compile it .* or set it to sdpa"),
        (FLASH3, False, "attn_implementation='flash_attention_3': flash-attn-3 is not installed; build it from"),
        (FLASH2 | FLOAT32, True, r"attn_impl.*_2': does not support float32; set critic\.model\.param_dtype=bfloat16$"),
        (LIGER, True, "use_liger=True: liger-kernel has no kernels for qwen2; set it to false"),
    ],
)
def test_kernels_of_gpus_need_their_package_and_its_support(check, monkeypatch, changes, installed, message):
    monkeypatch.setattr(checks, "_has_symbol", lambda *_: installed)
    kernels = ModuleType("liger_kernel.transformers.monkey_patch")
    kernels.MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": None}
    for module in (ModuleType("liger_kernel"), ModuleType("liger_kernel.transformers"), kernels):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(ConfigError, match=rf"^critic\.model\.{message}"):
        check("qwen2", changes, "cuda")


def test_a_policy_is_a_causal_language_model(model_config, tmp_path):
    MODELS["t5"].save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"^model\.path='.*': t5 is not a causal language model in transformers"):
        check_model(replace(model_config, path=str(tmp_path)), "model", "cpu")
