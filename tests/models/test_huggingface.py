"""What a model's folder holds besides its weights survives a checkpoint."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from transformers import AutoModelForCausalLM, Glm4MoeConfig, Glm4MoeForCausalLM, dynamic_module_utils
from transformers.core_model_loading import Chunk, WeightConverter, WeightRenaming

from verl.checkpoint.attempts import Attempt
from verl.checkpoint.export import export_checkpoint
from verl.checkpoint.folders import begin_checkpoint, complete_checkpoint
from verl.models import huggingface
from verl.models.huggingface import empty_model, persistent_buffers, write_architecture
from verl.models.info import ModelInfo
from verl.models.weight_files import write_huggingface


@pytest.fixture
def copied_model(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model's folder, to be altered."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def test_settings_that_transformers_warns_of_are_written_as_they_were(copied_model, tiny_tokenizer, tmp_path):
    # Without do_sample a temperature does nothing, and transformers refuses to save such a model.
    (copied_model / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "eos_token_id": [1, 2]}))
    weights = AutoModelForCausalLM.from_pretrained(copied_model).requires_grad_(False).named_parameters()
    shell = empty_model("actor", ModelInfo.read(str(copied_model), False))
    write_architecture(shell, tiny_tokenizer, tmp_path / "architecture", {})
    again = empty_model("actor", ModelInfo.read(str(tmp_path / "architecture"), False))
    write_huggingface(again, dict(weights), tiny_tokenizer, tmp_path / "huggingface")
    for name in ("architecture", "huggingface"):
        written = json.loads((tmp_path / name / "generation_config.json").read_text())
        assert (written["temperature"], written["eos_token_id"]) == (0.6, [1, 2])


def test_a_models_own_code_comes_along(copied_model, tiny_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    config = json.loads((copied_model / "config.json").read_text())
    names = {"AutoConfig": "configuration_my.MyConfig", "AutoModelForCausalLM": "modeling_my.MyModel"}
    (copied_model / "config.json").write_text(json.dumps(config | {"model_type": "my_qwen", "auto_map": names}))
    (copied_model / "configuration_my.py").write_text(
        "from transformers import Qwen2Config\n\nclass MyConfig(Qwen2Config):\n    model_type = 'my_qwen'\n"
    )
    (copied_model / "modeling_my.py").write_text(
        "from transformers import Qwen2ForCausalLM\nfrom .configuration_my import MyConfig\n\n"
        "class MyModel(Qwen2ForCausalLM):\n    config_class = MyConfig\n"
    )
    write_architecture(
        empty_model("actor", ModelInfo.read(str(copied_model), True)), tiny_tokenizer, tmp_path / "architecture", {}
    )
    shutil.rmtree(copied_model)
    assert type(empty_model("actor", ModelInfo.read(str(tmp_path / "architecture"), True))).__name__ == "MyModel"


def test_an_export_has_the_tensors_that_are_no_parameters(tiny_tokenizer, tmp_path):
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "head_dim": 16}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1}
    model = Glm4MoeForCausalLM(Glm4MoeConfig(**sizes, **heads, **experts))
    buffers = dict(model.named_buffers())
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    buffers[name].copy_(torch.arange(4.0))
    model.save_pretrained(tmp_path / "model")
    folder = begin_checkpoint(Attempt(tmp_path, 0), 1)
    state = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    writer = HuggingFaceStorageWriter(str(folder / "actor" / "shards"), save_distributed=True)
    dcp.save(state, storage_writer=writer, no_dist=True)
    assert persistent_buffers(model).keys() == {name}
    shell = empty_model("actor", ModelInfo.read(str(tmp_path / "model"), False))
    write_architecture(shell, tiny_tokenizer, folder / "actor" / "architecture", persistent_buffers(model))
    final = complete_checkpoint(folder, 1, "{}")
    out = export_checkpoint(final, tmp_path / "out", "actor", False)
    again = AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert again.keys() == model.state_dict().keys()
    assert all(torch.equal(again[name], value) for name, value in model.state_dict().items())
    half = export_checkpoint(final, tmp_path / "half", "actor", False, torch.bfloat16)
    halved = AutoModelForCausalLM.from_pretrained(half)
    # transformers keeps these in float32 whatever the dtype of the rest.
    assert {n for n, v in halved.state_dict().items() if v.dtype == torch.float32} == {name}
    assert torch.equal(halved.lm_head.weight, model.lm_head.weight.bfloat16())


def test_parts_of_one_tensor_in_the_files_go_out_together():
    model = nn.Module()
    model.config = None
    model._weight_conversions = [
        WeightRenaming("^old.", "new."),
        WeightConverter(["qkv.weight"], ["q.weight", "k.weight", "v.weight"], operations=[Chunk(dim=0)]),
    ]
    weights = {name: torch.randn(2, 2) for name in ("new.q.weight", "new.k.weight", "new.norm.weight", "new.v.weight")}
    given: list[str] = []

    def counted():
        for pair in weights.items():
            given.append(pair[0])
            yield pair

    written = huggingface.in_checkpoint_format(model, [*weights, "new.unknown"], counted())
    found = [(name, value, len(given)) for name, value in written]
    assert [(name, after) for name, _, after in found] == [("old.norm.weight", 3), ("old.qkv.weight", 4)]
    assert torch.equal(found[0][1], weights["new.norm.weight"])
    assert torch.equal(found[1][1], torch.cat([weights[f"new.{part}.weight"] for part in "qkv"]))


def test_values_over_the_config_are_exported(tiny_model, tiny_tokenizer, model_config, tmp_path):
    model = replace(model_config, override_config={"max_position_embeddings": 1024, "rope_theta": 5e5})
    write_architecture(empty_model("actor", ModelInfo.of(model)), tiny_tokenizer, tmp_path, {})
    exported = ModelInfo.read(str(tmp_path), False)
    assert (exported.max_length, exported.config.rope_parameters["rope_theta"]) == (1024, 5e5)
