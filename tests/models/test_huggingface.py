"""Folders of models: what they hold besides weights survives a checkpoint, and exports are the same whoever writes."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    dynamic_module_utils,
)
from transformers.core_model_loading import Chunk, WeightConverter, WeightRenaming

from tests.kit import edit_json, save_shards
from verl.checkpoint.attempts import Attempt
from verl.checkpoint.export import export_checkpoint
from verl.checkpoint.folders import begin_checkpoint, complete_checkpoint
from verl.models import huggingface
from verl.models.huggingface import WeightFiles, empty_model, saved_buffers, write_architecture, write_huggingface
from verl.models.info import ModelInfo
from verl.utils.files import file_record

SIZES = {"hidden_size": 32, "intermediate_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"num_hidden_layers": 2, "vocab_size": 50}
ROUTED = {"moe_intermediate_size": 16, "n_routed_experts": 3, "head_dim": 8, "first_k_dense_replace": 1}
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def qwen() -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True, dtype="bfloat16"))


def mixtral() -> PreTrainedModel:
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=3, dtype="float32"))


def glm() -> PreTrainedModel:
    model = Glm4MoeForCausalLM(Glm4MoeConfig(**SIZES, **ROUTED, dtype="bfloat16"))
    dict(model.named_buffers())[BIAS].copy_(torch.tensor([1.0, 2.0, 1 + 2**-20]))
    return model


@pytest.fixture
def copied_model(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model's folder, to be altered."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def test_generation_settings_survive_an_export(copied_model, tiny_tokenizer, tmp_path):
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


def test_code_of_a_model_is_exported(copied_model, tiny_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    names = {"AutoConfig": "configuration_my.MyConfig", "AutoModelForCausalLM": "modeling_my.MyModel"}
    edit_json(copied_model / "config.json", model_type="my_qwen", auto_map=names)
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


def test_export_has_buffers_that_are_saved(tiny_tokenizer, tmp_path):
    model = glm().float()
    model.save_pretrained(tmp_path / "model")
    folder = begin_checkpoint(Attempt(tmp_path, 0), 1)
    save_shards(folder, dict(model.named_parameters()))
    assert saved_buffers(model).keys() == {BIAS}
    shell = empty_model("actor", ModelInfo.read(str(tmp_path / "model"), False))
    write_architecture(shell, tiny_tokenizer, folder / "actor" / "architecture", saved_buffers(model))
    final = complete_checkpoint(folder, 1, "{}")
    out = export_checkpoint(final, tmp_path / "out", "actor", False)
    again = AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert again.keys() == model.state_dict().keys()
    assert all(torch.equal(again[name], value) for name, value in model.state_dict().items())
    half = export_checkpoint(final, tmp_path / "half", "actor", False, torch.bfloat16)
    halved = AutoModelForCausalLM.from_pretrained(half)
    # transformers keeps these in float32 whatever the dtype of the rest.
    assert {n for n, v in halved.state_dict().items() if v.dtype == torch.float32} == {BIAS}
    assert torch.equal(halved.lm_head.weight, model.lm_head.weight.bfloat16())


def test_parts_of_a_tensor_in_files_are_joined():
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


def test_override_config_is_exported(tiny_model, tiny_tokenizer, model_config, tmp_path):
    model = replace(model_config, override_config={"max_position_embeddings": 1024, "rope_theta": 5e5})
    write_architecture(empty_model("actor", ModelInfo.of(model)), tiny_tokenizer, tmp_path, {})
    exported = ModelInfo.read(str(tmp_path), False)
    assert (exported.max_length, exported.config.rope_parameters["rope_theta"]) == (1024, 5e5)


def saved(model: PreTrainedModel, folder: Path) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """The empty model of a folder with the weights of ``model``, and these by name."""
    dtype = model.config.dtype
    model.float().save_pretrained(folder)
    edit_json(folder / "config.json", dtype=str(dtype).removeprefix("torch."))
    shell = empty_model("actor", ModelInfo.read(str(folder), False))
    return shell, dict(model.requires_grad_(False).named_parameters()) | {
        name: buffer for name, buffer in model.named_buffers() if name == BIAS
    }


@pytest.mark.parametrize("build", [qwen, mixtral, glm])
def test_several_weight_files_equal_one_of_transformers(build, tiny_tokenizer, tmp_path: Path):
    shell, weights = saved(build(), tmp_path / "model")
    expected = load_file(tmp_path / "model" / "model.safetensors")
    files = WeightFiles(shell, file_bytes=6144)
    assert len(files.files) > 2 and sorted(n for names in files.files.values() for n in names) == sorted(weights)
    (tmp_path / "out").mkdir()
    found = {}
    for file in files.files:
        # Whoever writes a file needs its weights only.
        record = files.write(file, {name: weights[name] for name in files.files[file]}, tmp_path / "out")
        assert record == file_record(tmp_path / "out" / file)
        found |= load_file(tmp_path / "out" / file)
    half = build is not mixtral
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        dtype = torch.bfloat16 if half and name != BIAS else torch.float32
        assert found[name].dtype == dtype and torch.equal(found[name], value.to(dtype)), name
    files.write_index(tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": sum(value.nbytes for value in found.values())}
    assert all(name in load_file(tmp_path / "out" / file) for name, file in index["weight_map"].items())
    assert index["weight_map"].keys() == expected.keys()

    # As transformers loads it: in one file or several, the model is the same.
    shell.config.save_pretrained(tmp_path / "out")
    write_huggingface(shell, weights, tiny_tokenizer, tmp_path / "one")
    assert [path.name for path in (tmp_path / "one").glob("*.safetensors*")] == ["model.safetensors"]
    several, one = (AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("out", "one"))
    assert several.keys() == one.keys() and all(torch.equal(one[name], several[name]) for name in one)
    assert one["model.embed_tokens.weight"].dtype == (torch.bfloat16 if half else torch.float32)


def test_weight_files_do_not_depend_on_the_workers(tmp_path: Path):
    # One layer's q, k, v and o have 2 x 1024 and 2 x 512 numbers, the others of it 3 x 512; the embedding has 1600.
    files = WeightFiles(saved(qwen(), tmp_path)[0], file_bytes=6144)
    sizes = [files.num_bytes(names) for names in files.files.values()]
    assert sum(sizes) == 22_208 and max(sizes) <= 6144
    assert list(files.files)[0] == f"model-00001-of-{len(sizes):05d}.safetensors"
    for world_size in (1, 2, 3, 9):
        shares = [files.share(rank, world_size) for rank in range(world_size)]
        assert sorted(file for share in shares for file in share) == sorted(files.files)
        loads = [sum(files.num_bytes(files.files[file]) for file in share) for share in shares]
        assert max(loads) - min(loads) <= max(sizes)


def test_value_head_keeps_its_precision(tmp_path: Path):
    saved(qwen(), tmp_path)
    files = WeightFiles(empty_model("critic", ModelInfo.read(str(tmp_path), False)))
    kept = {name for name, dtype in files.dtypes.items() if dtype == torch.float32}
    assert kept == {"score.weight", "score.bias"}
    # What travels is never widened.
    assert files.sent_dtype("score.weight", torch.zeros(1, dtype=torch.bfloat16)) == torch.bfloat16
    assert files.sent_dtype("model.norm.weight", torch.zeros(1)) == torch.bfloat16
