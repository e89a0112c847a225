"""Training that starts from a saved adapter."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.kit import harm
from tests.models.models_in_worlds import example
from tests.tables import refusals
from verl.config.common import ModelConfig
from verl.models.checks import check_model
from verl.models.lora import adapters_disabled, read_saved_adapter

TENSOR = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.fixture
def adapter(tiny_model: Path, tmp_path: Path) -> Path:
    """An adapter of the tiny model with random weights, of rank 3 and scale 2."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    options = peft.LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    peft.get_peft_model(model, options).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_training_starts_from_a_saved_adapter(model_config: ModelConfig, make_actor, adapter: Path):
    config = replace(model_config, lora_adapter_path=str(adapter))
    assert config.lora.rank == 0 and config.trains_adapters
    check_model(config, "model", "cpu")
    actor = make_actor(config, optim={"lr": 1e-2, "lr_warmup_steps": 0})
    batch = example()
    found = actor.compute_logprobs(batch).logprobs

    base = AutoModelForCausalLM.from_pretrained(config.path).eval()
    plain = AutoModelForCausalLM.from_pretrained(config.path)

    def logprobs(model: Any) -> torch.Tensor:
        with torch.no_grad():
            rows = [(row, model(row.tokens[None]).logits[0, row.predictors].log_softmax(-1)) for row in batch.split(1)]
        return torch.cat([every.gather(-1, row.response_tokens[:, None])[:, 0] for row, every in rows])

    adapted = logprobs(peft.PeftModel.from_pretrained(plain, adapter).eval())
    torch.testing.assert_close(found, adapted, atol=1e-4, rtol=0)
    assert (found - logprobs(base)).abs().max() > 1e-2
    with adapters_disabled(actor.model):
        torch.testing.assert_close(actor.compute_logprobs(batch).logprobs, logprobs(base), atol=1e-4, rtol=0)
    batch.fill(old_logprobs=found)
    actor.update(batch, len(found), len(batch))
    trained = {name for name, parameter in actor.model.named_parameters() if parameter.requires_grad}
    assert trained and all(".lora_" in name for name in trained)
    assert (actor.compute_logprobs(batch).logprobs - found).abs().max() > 1e-4


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    file = folder / "adapter_model.safetensors"
    state = load_file(file)
    change(state)
    save_file(state, file)


@pytest.mark.parametrize(("damage", "line"), refusals("models/refusals.txt", "adapters"))
def test_unfit_adapter_is_refused(model_config: ModelConfig, adapter: Path, refused, damage: str, line: str):
    if damage.startswith("tensors"):
        eval(damage, {"tensors": partial(change_tensors, adapter), "TENSOR": TENSOR, "torch": torch})
    else:
        harm(adapter, damage)
    with refused(line):
        check_model(replace(model_config, lora_adapter_path=str(adapter)), "model", "cpu")


def test_adapter_with_nonfinite_values_is_refused(model_config, make_actor, refused, adapter: Path):
    config = replace(model_config, lora_adapter_path=str(adapter))
    # The second is finite in float64 alone.
    for value in (torch.nan, 1e300):
        change_tensors(adapter, lambda state, value=value: state.update({TENSOR: state[TENSOR].double().fill_(value)}))
        with refused(f"model.lora_adapter_path='TMP/adapter': {TENSOR} holds values that are not finite..."):
            make_actor(config)


def test_adapter_that_verl_saved_is_read(tiny_model: Path, adapter: Path):
    # Its checkpoints hold every field of the options, as this file does.
    saved = asdict(peft.LoraConfig.from_pretrained(str(adapter))) | {"peft_type": "LORA", "task_type": "CAUSAL_LM"}
    assert saved["runtime_config"] == {"ephemeral_gpu_offload": False}
    (adapter / "adapter_config.json").write_text(json.dumps(saved, default=sorted))
    found = read_saved_adapter(str(adapter), AutoModelForCausalLM.from_pretrained(tiny_model), "x")
    assert (found.r, found.lora_alpha, found.target_modules) == (3, 6, {"down_proj", "q_proj"})
