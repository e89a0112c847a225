"""What is refused before workers start."""

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import transformers

from verl.config import PPOConfig, load_config
from verl.config.common import LoraConfig, ModelConfig
from verl.models import checks as model_checks
from verl.models.checks import check_length, check_model


@pytest.fixture
def config(tiny_model: Path) -> ModelConfig:
    return replace(load_config(PPOConfig, "ppo_trainer").model, path=str(tiny_model))


def lora(*targets: str) -> LoraConfig:
    return LoraConfig(rank=4, alpha=8.0, target_modules=list(targets))


def test_what_the_model_has_is_accepted(config):
    check_model(config, "model", "cpu")
    check_model(replace(config, lora=lora("q_proj", "down_proj"), gradient_checkpointing=True), "model", "cpu")
    check_model(replace(config, lora=lora("all-linear")), "model", "cpu")


def test_unknown_layers_are_answered_with_those_there_are(config):
    with pytest.raises(
        ValueError,
        match=r"^critic\.model\.lora\.target_modules=\['q_proj', 'c_attn', 'lm_head'\]: Qwen2ForCausalLM has no linear "
        r"layers called c_attn, lm_head; it has down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj$",
    ):
        check_model(replace(config, lora=lora("q_proj", "c_attn", "lm_head")), "critic.model", "cpu")


def test_a_model_without_linear_layers_is_answered_so(config, tmp_path):
    transformers.GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=16).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has no linear layers called all-linear; it has none$"):
        check_model(replace(config, path=str(tmp_path), lora=lora("all-linear")), "model", "cpu")


def test_all_linear_stands_alone():
    with pytest.raises(ValueError, match="all-linear covers all layers; leave out the others"):
        lora("all-linear", "q_proj")


def test_kernels_of_gpus_are_refused_without_one(config):
    with pytest.raises(ValueError, match=r"^model.use_liger=True: runs on GPUs alone; set it to false$"):
        check_model(replace(config, use_liger=True), "model", "cpu")
    flash = replace(config, attn_implementation="flash_attention_2")
    with pytest.raises(ValueError, match=r"^model.attn_implementation='flash_attention_2': runs on GPUs alone; set it"):
        check_model(flash, "model", "cpu")
    with pytest.raises(ValueError, match=r"^model.attn_implementation='flash_attention_3': runs on GPUs alone; set it"):
        check_model(replace(flash, attn_implementation="flash_attention_3"), "model", "cpu")


def test_a_bound_on_attention_scores_is_not_left_out(config, tmp_path):
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 8}
    gemma = transformers.Gemma2Config(**sizes, num_key_value_heads=1, vocab_size=16, attn_logit_softcapping=0.5)
    gemma.save_pretrained(tmp_path)
    capped = replace(config, path=str(tmp_path))
    with pytest.raises(
        ValueError,
        match=r"^critic.model.attn_implementation='sdpa': knows no bound on attention scores, as gemma2 has it "
        r"\(attn_logit_softcapping=0.5\); set it to eager or flash_attention_2$",
    ):
        check_model(capped, "critic.model", "cpu")
    check_model(replace(capped, attn_implementation="eager"), "critic.model", "cpu")


def test_missing_packages_are_named(config, monkeypatch):
    monkeypatch.setattr(model_checks, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"liger-kernel is not installed; `pip install liger-kernel`, or set it to"):
        check_model(replace(config, use_liger=True), "model", "cuda")
    third = replace(config, attn_implementation="flash_attention_3")
    with pytest.raises(
        ValueError, match=r"^model.attn_implementation='flash_attention_3': flash-attn-3 is not installed"
    ):
        check_model(third, "model", "cuda")
    flash = replace(config, attn_implementation="flash_attention_2")
    with pytest.raises(ValueError, match=r"flash-attn is not installed; `pip install flash-attn`, or set it to sdpa"):
        check_model(flash, "model", "cuda")


def test_what_the_packages_cannot_do_is_refused(config, monkeypatch):
    monkeypatch.setattr(model_checks, "find_spec", lambda name: True)
    flash = replace(config, attn_implementation="flash_attention_2", param_dtype="float32")
    with pytest.raises(ValueError, match=r"has no float32; set model.param_dtype=bfloat16, or it to sdpa"):
        check_model(flash, "model", "cuda")
    kernels = ModuleType("liger_kernel.transformers.monkey_patch")
    kernels.MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": None}
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
    with pytest.raises(ValueError, match=r"liger-kernel has no kernels for qwen2; set it to false"):
        check_model(replace(config, use_liger=True), "model", "cuda")


LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        (LONGROPE, "longrope"),
        ({"rope_type": "dynamic", "factor": 2.0}, "dynamic"),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}, None),
        ({"rope_type": "default"}, None),
    ],
)
def test_rotary_embeddings_that_neighbours_change_are_refused_beyond_their_length(config, tmp_path, rope, named):
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 64}
    transformers.LlamaConfig(**sizes, rope_parameters=rope | {"rope_theta": 1e4}).save_pretrained(tmp_path)
    model = replace(config, path=str(tmp_path))
    check_length(model, "model", 64)
    if named is None:
        check_length(model, "model", 65)
        return
    with pytest.raises(
        ValueError, match=rf"^critic.model.path=.*: beyond 64 tokens .* llama \({named}\) .* have 65 here"
    ):
        check_length(model, "critic.model", 65)
