"""Options of models that are refused before workers start. Loading itself is met in test_sharding.py."""

import sys
from dataclasses import replace
from types import ModuleType

import pytest
from safetensors.torch import save_file
from transformers import FalconConfig, Gemma2Config, Gemma3Config, GPT2Config, Qwen2_5_VLConfig, Qwen2Config, T5Config

from tests.tables import refusals
from verl.config.common import LoraConfig
from verl.models import checks
from verl.models.checks import check_model

SIZES = {"vocab_size": 16, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
MODELS = {
    "qwen2": Qwen2Config(**SIZES, intermediate_size=8),
    "mixed_layers": Qwen2Config(**SIZES, layer_types=["full_attention", "linear_attention", "full_attention"]),
    "gemma2": Gemma2Config(**SIZES, intermediate_size=8, head_dim=8, attn_logit_softcapping=0.5),
    "gpt2": GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=16),
    "falcon": FalconConfig(**SIZES),
    "gemma3": Gemma3Config(),
    "qwen2_5_vl": Qwen2_5_VLConfig(),
    "t5": T5Config(),
}
FLASH3 = {"attn_implementation": "flash_attention_3"}
PACKED = {"use_remove_padding": True}


def lora(*targets: str) -> LoraConfig:
    return LoraConfig(rank=4, alpha=8.0, target_modules=list(targets), dropout=0.0)


@pytest.fixture
def check(model_config, tmp_path):
    def check(model: str, device_type: str = "cpu", name: str = "critic.model", **changes: object) -> None:
        MODELS[model].save_pretrained(tmp_path)
        save_file({}, tmp_path / "model.safetensors")
        check_model(replace(model_config, path=str(tmp_path), **changes), name, device_type)

    return check


def test_empty_package_is_not_a_kernel(check, refused, monkeypatch, tmp_path):
    package = tmp_path / "site"
    package.mkdir()
    (package / "flash_attn_interface.py").write_text('"""A placeholder."""\n')
    monkeypatch.syspath_prepend(package)
    with refused("...flash-attn-3 is not installed; ... or set it to sdpa, which needs no package"):
        check("qwen2", "cuda", **FLASH3, param_dtype="bfloat16")
    (package / "flash_attn_interface.py").write_text("def flash_attn_varlen_func(): ...\n")
    check("qwen2", "cuda", **FLASH3, param_dtype="bfloat16")


def test_supported_options_are_accepted(check):
    for changes in (
        {},
        {"lora": lora("q_proj", "down_proj"), "gradient_checkpointing": True},
        {"lora": lora("all-linear")},
        PACKED | {"ulysses_sequence_parallel_size": 4},
    ):
        check("qwen2", **changes)
    check("gemma2", attn_implementation="eager")


@pytest.mark.parametrize(("call", "line"), refusals("models/refusals.txt", "options"))
def test_unsupported_option_is_refused(check, refused, call, line):
    with refused(line):
        eval(f"check({call})", {"check": check, "lora": lora})


@pytest.mark.parametrize(("installed", "call", "line"), refusals("models/refusals.txt", "kernels"))
def test_missing_or_unfit_kernel_is_refused(check, refused, monkeypatch, installed, call, line):
    monkeypatch.setattr(checks, "_has_symbol", lambda *_: installed == "installed")
    kernels = ModuleType("liger_kernel.transformers.monkey_patch")
    kernels.MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": None}
    for module in (ModuleType("liger_kernel"), ModuleType("liger_kernel.transformers"), kernels):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    with refused(line):
        eval(f"check('qwen2', 'cuda', {call})", {"check": check})
