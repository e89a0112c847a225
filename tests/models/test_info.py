"""What a model's config says, how often it is read, and broken files: each is named in one line."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, T5Config

from tests.kit import harm
from tests.tables import refusals
from verl.config import ConfigError
from verl.models.checks import check_length
from verl.models.hub import is_complete
from verl.models.info import ModelInfo, check_weights, override_engine_config, override_notes
from verl.models.tokenizer import load_tokenizer


def test_model_info_has_the_facts_of_a_model(tiny_model, tmp_path):
    info = ModelInfo.read(str(tiny_model), trust_remote_code=False)
    assert (info.num_layers, info.max_length, info.has_value_form) == (4, 512, True)
    assert info.causal_model.device.type == "meta" and info.causal_model.num_parameters() == 888_192
    T5Config(num_layers=1).save_pretrained(tmp_path / "t5")
    with pytest.raises(ConfigError, match="t5': its config.json describes no model: Unrecognized configuration class"):
        _ = ModelInfo.read(str(tmp_path / "t5"), False).causal_model
    with pytest.raises(ConfigError, match="cannot read its config.json: Unrecognized model"):
        ModelInfo.read(str(tmp_path), trust_remote_code=False)


@pytest.mark.parametrize(
    ("in_config", "in_file", "further", "expected"),
    [
        (None, None, [], [0]),
        (1, None, [], [0, 1]),
        ([1, 0], None, [9], [0, 1, 9]),
        # The file of its own comes before the model's config, as in transformers.
        (1, {"eos_token_id": 2}, [], [0, 2]),
        (1, {"eos_token_id": [3, 2], "temperature": 0.5, "do_sample": True}, [], [0, 2, 3]),
        (1, {"do_sample": True}, [], [0]),
    ],
)
def test_end_tokens_of_a_model(tiny_model, tiny_tokenizer, tmp_path, in_config, in_file, further, expected):
    """Token numbers are counted from the tokenizer's end of sequence, which always ends a response."""
    own = tiny_tokenizer.eos_token_id

    def shifted(ids: int | list[int] | None) -> int | list[int] | None:
        return [own + i for i in ids] if isinstance(ids, list) else None if ids is None else own + ids

    config = json.loads((tiny_model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": shifted(in_config)}))
    if in_file is not None:
        settings = in_file | {"eos_token_id": shifted(in_file.get("eos_token_id"))}
        (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    info = ModelInfo.read(str(tmp_path), False)
    assert info.end_tokens(tiny_tokenizer, shifted(further)) == shifted(expected)


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        (LONGROPE | {"original_max_position_embeddings": 64}, "longrope"),
        ({"rope_type": "dynamic", "factor": 2.0}, "dynamic"),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}, None),
        ({"rope_type": "default"}, None),
    ],
)
def test_dynamic_rotary_embedding_is_refused_beyond_its_length(model_config, tmp_path, rope, named):
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 64}
    LlamaConfig(**sizes, rope_parameters=rope | {"rope_theta": 1e4}).save_pretrained(tmp_path)
    model = replace(model_config, path=str(tmp_path))
    check_length(model, "model", 64 if named else 65)
    if named is None:
        return
    message = rf"^critic.model.path=.*: sequences may have 65 tokens, and beyond 64 .* llama \({named}\) .*shorter"
    with pytest.raises(ConfigError, match=message):
        check_length(model, "critic.model", 65)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def test_override_config_changes_model_and_engine(model_config, tmp_path):
    rope = {"rope_type": "default", "rope_theta": 5e5}
    LlamaConfig(max_position_embeddings=64, rope_parameters=rope).save_pretrained(tmp_path)
    model = replace(model_config, path=str(tmp_path))

    def info(**overrides: object) -> ModelInfo:
        return ModelInfo.of(replace(model, override_config=overrides))

    longer = info(max_position_embeddings=256, rope_scaling=YARN, attention_dropout=0.1)
    assert (longer.max_length, longer.config.attention_dropout) == (256, 0.1)
    # A base that only the file names stays.
    assert longer.config.rope_parameters == YARN | {"rope_theta": 5e5}
    assert info(rope_theta=1e6).config.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}
    assert info().max_length == 64 and ModelInfo.of(model).config.rope_parameters["rope_theta"] == 5e5
    # What an engine reads from the same file becomes the same.
    overridden = replace(model, override_config={"rope_scaling": YARN, "max_position_embeddings": 256})
    theirs = override_engine_config(overridden, AutoConfig.from_pretrained(tmp_path))
    assert (theirs.rope_parameters, theirs.max_position_embeddings) == (YARN | {"rope_theta": 5e5}, 256)


def test_zero_dropout_without_effect_is_a_note(model_config):
    # The lines of veRL's DAPO recipe: GPT-2's names beside that of the others.
    rates = {"attention_dropout": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    model = replace(model_config, override_config=rates)
    assert "resid_pdrop" not in ModelInfo.of(model).config.to_dict()
    assert override_notes(model) == [
        "model.override_config: no effect of embd_pdrop, resid_pdrop=0: qwen2 has no such dropout"
    ]
    engine = override_engine_config(model, AutoConfig.from_pretrained(model.path))
    assert engine.attention_dropout == 0.0 and not hasattr(engine, "resid_pdrop")
    assert override_notes(replace(model, override_config={"attention_dropout": 0.0})) == []


@pytest.mark.parametrize(("values", "line"), refusals("models/refusals.txt", "overrides"))
def test_value_that_the_model_refuses_is_one_line(model_config, refused, values: str, line: str):
    with refused(line, MODEL=model_config.path):
        ModelInfo.of(replace(model_config, override_config=eval(f"dict({values})")))


def rename_weights(folder: Path, **weight_map: Any) -> None:
    """Give the weights an index and the name of a part."""
    harm(folder, 'rename("model.safetensors", "part.safetensors")')
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def look(folder: Path) -> None:
    """Read a model as a run does before Ray starts."""
    info = ModelInfo.read(str(folder), False)
    tokenizer = load_tokenizer(str(folder), False, needs_chat_template=False)
    check_weights(info, f"model.path={str(folder)!r}")
    info.end_tokens(tokenizer)


@pytest.mark.parametrize(("damage", "line"), refusals("models/refusals.txt", "folders"))
def test_broken_model_is_named_in_one_line(tiny_model: Path, tmp_path: Path, refused, damage: str, line: str):
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    look(folder)
    ModelInfo.read.cache_clear()
    if damage.startswith("index"):
        eval(damage, {"index": partial(rename_weights, folder)})
    else:
        harm(folder, damage)
    with refused(line):
        look(folder)


def test_sharded_and_pickled_weights_are_accepted(tiny_model: Path, tmp_path: Path):
    for name in ("parts", "older"):
        shutil.copytree(tiny_model, tmp_path / name)
    # Some published indices name a head that is the embedding, and which no file has.
    weights = {"model.norm.weight": "part.safetensors", "lm_head.weight": "part.safetensors"}
    rename_weights(tmp_path / "parts", **weights)
    (tmp_path / "older" / "model.safetensors").rename(tmp_path / "older" / "pytorch_model.bin")
    look(tmp_path / "parts")
    look(tmp_path / "older")
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "parts", output_loading_info=True)
    assert model.config.tie_word_embeddings and not report["missing_keys"]


def test_cached_copy_with_a_broken_index_is_incomplete(tiny_model: Path, tmp_path: Path):
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    rename_weights(folder, **{"model.norm.weight": "part.safetensors"})
    assert is_complete(folder)
    for content in (b"[1]", b'{"weight_map": {"a": 1}}', b"\xff"):
        (folder / "model.safetensors.index.json").write_bytes(content)
        assert not is_complete(folder)
