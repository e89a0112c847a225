"""Exports in several files: the same files whoever writes them, in the names and the precision that the model has."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from verl.models.huggingface import empty_model
from verl.models.info import ModelInfo
from verl.models.weight_files import WeightFiles, write_huggingface
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


def saved(model: PreTrainedModel, folder: Path) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """The empty model of a folder with the weights of ``model``, and these by name."""
    dtype = model.config.dtype
    model.float().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": str(dtype).removeprefix("torch.")}))
    shell = empty_model("actor", ModelInfo.read(str(folder), False))
    return shell, dict(model.requires_grad_(False).named_parameters()) | {
        name: buffer for name, buffer in model.named_buffers() if name == BIAS
    }


@pytest.mark.parametrize("build", [qwen, mixtral, glm])
def test_several_files_hold_what_one_by_transformers_does(build, tiny_tokenizer, tmp_path: Path):
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


def test_files_do_not_depend_on_who_writes_them(tmp_path: Path):
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


def test_a_values_head_keeps_its_precision(tmp_path: Path):
    saved(qwen(), tmp_path)
    files = WeightFiles(empty_model("critic", ModelInfo.read(str(tmp_path), False)))
    kept = {name for name, dtype in files.dtypes.items() if dtype == torch.float32}
    assert kept == {"score.weight", "score.bias"}
    # What travels is never widened.
    assert files.travel_dtype("score.weight", torch.zeros(1, dtype=torch.bfloat16)) == torch.bfloat16
    assert files.travel_dtype("model.norm.weight", torch.zeros(1)) == torch.bfloat16
