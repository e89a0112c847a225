"""What a model's config says, how often it is read, and broken files: each is named in one line."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, T5Config

from verl.config import ConfigError
from verl.models.checks import check_length
from verl.models.hub import is_complete
from verl.models.info import ModelInfo, check_weights, override_engine_config, override_notes
from verl.models.tokenizer import load_tokenizer


def test_facts_of_a_model(tiny_model, tmp_path):
    info = ModelInfo.read(str(tiny_model), trust_remote_code=False)
    assert (info.num_layers, info.max_length, info.has_value_form) == (4, 512, True)
    assert info.causal_model.device.type == "meta" and info.causal_model.num_parameters() == 888_192
    T5Config(num_layers=1).save_pretrained(tmp_path / "t5")
    with pytest.raises(ConfigError, match="t5': its config.json describes no model: Unrecognized configuration class"):
        _ = ModelInfo.read(str(tmp_path / "t5"), False).causal_model
    with pytest.raises(ConfigError, match="cannot read its config.json: Unrecognized model"):
        ModelInfo.read(str(tmp_path), trust_remote_code=False)


@pytest.mark.parametrize(
    ("in_config", "in_generation", "further", "expected"),
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
def test_what_ends_a_response(tiny_model, tiny_tokenizer, tmp_path, in_config, in_generation, further, expected):
    """Token numbers are counted from the tokenizer's end of sequence, which always ends a response."""
    own = tiny_tokenizer.eos_token_id

    def shifted(ids: int | list[int] | None) -> int | list[int] | None:
        return [own + i for i in ids] if isinstance(ids, list) else None if ids is None else own + ids

    config = json.loads((tiny_model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": shifted(in_config)}))
    if in_generation is not None:
        settings = in_generation | {"eos_token_id": shifted(in_generation.get("eos_token_id"))}
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
def test_rotary_embeddings_that_neighbours_change_are_refused_beyond_their_length(model_config, tmp_path, rope, named):
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


def test_values_over_a_models_config(model_config, tmp_path):
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


def test_dropout_of_0_that_the_architecture_does_not_have_is_a_note(model_config):
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


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"resid_pdrop": 0.1}, r"\.resid_pdrop=0.1: qwen2 at .* has no such option; a model keeps its .*"),
        ({"max_position_embedings": 9}, r"\.max_position_embedings=9: qwen2 at .* no such option; did you mean max_p"),
        ({"model_type": "llama"}, r"\.model_type='llama': .* a model keeps its architecture's options$"),
        ({"hidden_size": "wide"}, r"=\{'hidden_size': 'wide'\}: qwen2 refuses it: .*'hidden_size' expected int.*$"),
        ({"num_hidden_layers": 2}, r"=\{'num_hidden_layers': 2\}: qwen2 refuses it: .*`num_hidden_layers` .2. must.*$"),
    ],
)
def test_values_that_a_model_does_not_have_or_refuses_are_one_line(model_config, overrides, message):
    with pytest.raises(ConfigError, match=rf"^model\.override_config{message}"):
        ModelInfo.of(replace(model_config, override_config=overrides))


def options(folder: Path, file: str = "config.json", **changes: Any) -> None:
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def cut(size: int) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:size])

    return apply


def write(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content) and None


def index(**weight_map: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "part.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    return apply


GENERATION, TOKENIZER = "generation_config.json", "tokenizer.json"
BROKEN = {
    "config a list": (write("config.json", b"[1]"), "cannot read its config.json"),
    "config cut": (write("config.json", b'{"model_type": '), "cannot read its config.json"),
    "config deep": (write("config.json", b"[" * 5000), "cannot read its config.json"),
    "config of other types": (lambda f: options(f, num_hidden_layers="two"), "cannot read its config.json"),
    "activation": (lambda f: options(f, hidden_act="none"), "its config.json describes no model"),
    "kernels": (
        lambda f: options(f, attn_implementation="someone/kernels:attend"),
        "names code of the hub, someone/ker",
    ),
    "vocabulary": (
        lambda f: options(f, vocab_size=1000),
        "model.embed_tokens.weight has shape [262, 128] in its files",
    ),
    "smaller": (lambda f: options(f, vocab_size=10), "and [10, 128] by its config.json (vocab_size, hidden_size"),
    "width": (lambda f: options(f, hidden_size=96), "model.embed_tokens.weight has shape [262, 128] in its files, and"),
    "data cut": (cut(-1000), "model.safetensors is broken or cut short"),
    "empty": (cut(0), "model.safetensors is broken or cut short"),
    "length too large": (write("model.safetensors", b"\xff" * 8 + b"{}"), "model.safetensors is broken or cut short"),
    "no weights": (
        lambda f: (f / "model.safetensors").unlink(),
        "files of its weights are missing; name a folder saved by",
    ),
    "shard missing": (index(a="other.safetensors"), "files of its weights are missing"),
    "shard elsewhere": (index(a="../model/part.safetensors"), "files of its weights are missing"),
    "index a list": (index(a=[1]), "files of its weights are missing"),
    "end token": (lambda f: options(f, GENERATION, eos_token_id=99999), "eos=99999: the model has tokens 0 to 261"),
    "negative": (lambda f: options(f, GENERATION, eos_token_id=[2, -5]), "eos=-5: the model has tokens 0 to 261"),
    "generation a list": (write(GENERATION, b"[1]"), "cannot read its generation_config.json"),
    "generation cut": (write(GENERATION, b'{"a'), "cannot read its generation_config.json"),
    "tokenizer a list": (write(TOKENIZER, b"[]"), "no tokenizer there"),
    "options of the tokenizer": (write("tokenizer_config.json", b"[1]"), "no tokenizer there"),
    "template not UTF-8": (write("chat_template.jinja", b"\xff{{ a }}"), "no tokenizer there"),
}


def look(folder: Path) -> None:
    """As a run looks at its model before Ray starts."""
    info = ModelInfo.read(str(folder), False)
    tokenizer = load_tokenizer(str(folder), False, needs_chat_template=False)
    check_weights(info, f"model.path={str(folder)!r}")
    info.end_tokens(tokenizer)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_model_is_named_in_one_line(name: str, tiny_model: Path, tmp_path: Path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    look(folder)
    ModelInfo.read.cache_clear()
    spoil, message = BROKEN[name]
    spoil(folder)
    with pytest.raises(ConfigError) as caught:
        look(folder)
    text = str(caught.value)
    assert text.startswith(f"model.path={str(folder)!r}: ") and message in text and "\n" not in text


def test_a_model_in_parts_and_one_in_an_older_form_are_taken(tiny_model: Path, tmp_path: Path):
    for name in ("parts", "older"):
        shutil.copytree(tiny_model, tmp_path / name)
    # Some published indices name a head that is the embedding, and which no file has.
    index(**{"model.norm.weight": "part.safetensors", "lm_head.weight": "part.safetensors"})(tmp_path / "parts")
    (tmp_path / "older" / "model.safetensors").rename(tmp_path / "older" / "pytorch_model.bin")
    look(tmp_path / "parts")
    look(tmp_path / "older")
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "parts", output_loading_info=True)
    assert model.config.tie_word_embeddings and not report["missing_keys"]


def test_a_copy_of_the_hub_with_a_broken_index_is_not_complete(tiny_model: Path, tmp_path: Path):
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    index(**{"model.norm.weight": "part.safetensors"})(folder)
    assert is_complete(folder)
    for content in (b"[1]", b'{"weight_map": {"a": 1}}', b"\xff"):
        (folder / "model.safetensors.index.json").write_bytes(content)
        assert not is_complete(folder)
