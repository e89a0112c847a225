"""Training that starts from a saved adapter."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.conftest import changed
from tests.models.models_in_worlds import example
from verl.config.common import ModelConfig
from verl.config.errors import ConfigError
from verl.models.checks import check_model
from verl.models.lora import adapters_disabled, read_saved_adapter
from verl.workers.actor import Actor

TENSOR = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.fixture
def adapter(tiny_model: Path, tmp_path: Path) -> Path:
    """An adapter of the tiny model with random weights, of rank 3 and scale 2."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    options = peft.LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    peft.get_peft_model(model, options).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_training_starts_from_the_adapter_with_its_own_rank_and_scale(
    small_config, model_config: ModelConfig, single_mesh, adapter: Path
):
    config = replace(model_config, lora_adapter_path=str(adapter))
    assert config.lora.rank == 0 and config.trains_adapters
    check_model(config, "model", "cpu")
    options = {"use_kl_loss": False, "optim": {"lr": 1e-2, "lr_warmup_steps": 0}}
    actor = Actor(changed(small_config.actor, **options), config, single_mesh, 1.0, 10, max_response_length=9)
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


def options(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        file = folder / "adapter_model.safetensors"
        state = load_file(file)
        change(state)
        save_file(state, file)

    return rewrite


def text(name: str, content: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(content)


def pickled(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


NO_LORA = "adapter_config.json does not describe a LoRA adapter"
RANGE = "r must be a whole number of at least 1, and lora_alpha / r from 1/10000 to 10000"
BROKEN = {
    "no folder": (lambda folder: (folder / "adapter_config.json").unlink(), "there is no adapter_config.json; name"),
    "not JSON": (text("adapter_config.json", "{"), NO_LORA),
    "deep JSON": (text("adapter_config.json", "[" * 100_000), NO_LORA),
    "a list": (text("adapter_config.json", "[]"), NO_LORA),
    "another method": (options(peft_type="VERA"), NO_LORA),
    "DoRA": (options(use_dora=True), "use_dora=True: only plain LoRA can be trained further"),
    "ranks by layer": (options(rank_pattern={"q_proj": 9}), "rank_pattern={'q_proj': 9}: only plain LoRA"),
    "bias": (options(bias="all"), "bias='all': only plain LoRA"),
    "further modules": (options(modules_to_save=["embed_tokens"]), "modules_to_save=.*: only plain LoRA"),
    "PiSSA": (options(init_lora_weights="pissa"), "init_lora_weights='pissa': only plain LoRA"),
    "rank": (options(r=True), f"r=True, lora_alpha=6: {RANGE}"),
    "huge rank": (options(r=10**400), f"r=1000+, lora_alpha=6: {RANGE}"),
    "huge scale": (options(lora_alpha=10**400), f"lora_alpha=1000+: {RANGE}"),
    "infinite scale": (options(lora_alpha=float("inf")), f"lora_alpha=inf: {RANGE}"),
    "no scale": (options(lora_alpha=1e-320), f"lora_alpha=1e-320: {RANGE}"),
    "a pattern": (options(target_modules="(a+)+$"), r"target_modules='\(a\+\)\+\$': must list the names of layers"),
    "no layers": (options(target_modules=["q_proj", "c_attn"]), "has no linear layers called c_attn"),
    "the head": (options(target_modules=["q_proj", "lm_head"]), "has no linear layers called lm_head"),
    "pickle": (pickled, "adapter_model.safetensors is missing"),
    "garbage": (text("adapter_model.safetensors", "x" * 100), "adapter_model.safetensors is broken"),
    "another rank": (options(r=4), r"q_proj|down_proj.* has shape \[3, .*\], expected \[4, "),
    "missing": (tensors(lambda state: state.pop(TENSOR)), rf"{TENSOR} has shape none, expected \[3, "),
    "too much": (tensors(lambda state: state.update(x=torch.zeros(1))), r"x has shape \[1\], expected none"),
}


@pytest.mark.parametrize(("spoil", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_what_is_not_a_plain_adapter_of_the_model_is_refused(
    model_config: ModelConfig, adapter: Path, spoil: Callable[[Path], None], message: str
):
    spoil(adapter)
    with pytest.raises(ConfigError, match=message) as error:
        check_model(replace(model_config, lora_adapter_path=str(adapter)), "model", "cpu")
    assert str(error.value).startswith(f"model.lora_adapter_path={str(adapter)!r}: ") and len(str(error.value)) < 500


def test_values_that_are_not_finite_are_refused(small_config, model_config: ModelConfig, single_mesh, adapter: Path):
    config = replace(model_config, lora_adapter_path=str(adapter))
    # The second is finite in float64 alone.
    for value in (torch.nan, 1e300):
        tensors(lambda state, value=value: state.update({TENSOR: state[TENSOR].double().fill_(value)}))(adapter)
        with pytest.raises(ConfigError, match=rf"{TENSOR} holds values that are not finite"):
            Actor(small_config.actor, config, single_mesh, 1.0, 10, max_response_length=9)


def test_adapters_that_verl_saved_are_read(tiny_model: Path, adapter: Path):
    # Its checkpoints hold every field of the options, as this file does.
    saved = asdict(peft.LoraConfig.from_pretrained(str(adapter))) | {"peft_type": "LORA", "task_type": "CAUSAL_LM"}
    assert saved["runtime_config"] == {"ephemeral_gpu_offload": False}
    (adapter / "adapter_config.json").write_text(json.dumps(saved, default=sorted))
    found = read_saved_adapter(str(adapter), AutoModelForCausalLM.from_pretrained(tiny_model), "x")
    assert (found.r, found.lora_alpha, found.target_modules) == (3, 6, {"down_proj", "q_proj"})
