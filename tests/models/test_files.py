"""Broken files of a model: each is found from the files alone, and named in one line."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from verl.config import ConfigError
from verl.models.files import check_weights
from verl.models.hub import is_complete
from verl.models.info import ModelInfo
from verl.models.tokenizer import load_tokenizer


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


def without(name: str) -> Callable[[Path], None]:
    """Weights in parts that lack a tensor of the index."""

    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        index(**dict.fromkeys(tensors, "part.safetensors"))(folder)
        save_file({other: tensor for other, tensor in tensors.items() if other != name}, folder / "part.safetensors")

    return apply


GENERATION, TOKENIZER = "generation_config.json", "tokenizer.json"
BROKEN = {
    "config a list": (write("config.json", b"[1]"), "cannot read its config.json"),
    "config null": (write("config.json", b"null"), "cannot read its config.json"),
    "config cut": (write("config.json", b'{"model_type": '), "cannot read its config.json"),
    "config not UTF-8": (write("config.json", b'\xff\xfe{"a": 1}'), "cannot read its config.json"),
    "config deep": (write("config.json", b"[" * 5000), "cannot read its config.json"),
    "config of other types": (lambda f: options(f, num_hidden_layers="two"), "cannot read its config.json"),
    "activation": (lambda f: options(f, hidden_act="none"), "its config.json describes no model"),
    "vocabulary": (
        lambda f: options(f, vocab_size=1000),
        "model.embed_tokens.weight has shape [262, 128] in its files",
    ),
    "smaller": (lambda f: options(f, vocab_size=10), "and [10, 128] by its config.json (vocab_size, hidden_size"),
    "width": (lambda f: options(f, hidden_size=96), "model.embed_tokens.weight has shape [262, 128] in its files, and"),
    "data cut": (cut(-1000), "model.safetensors is broken or cut short"),
    "header cut": (cut(100), "model.safetensors is broken or cut short"),
    "length cut": (cut(5), "model.safetensors is broken or cut short"),
    "empty": (cut(0), "model.safetensors is broken or cut short"),
    "length too large": (write("model.safetensors", b"\xff" * 8 + b"{}"), "model.safetensors is broken or cut short"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "there are no weights (model.safetensors)"),
    "shard missing": (index(a="other.safetensors"), "other.safetensors is missing; fetch or copy the model again"),
    "tensor missing": (
        without("model.norm.weight"),
        "part.safetensors lacks model.norm.weight, which model.safetensors",
    ),
    "shard elsewhere": (index(a="../part.safetensors"), "names '../part.safetensors', which is no file of the folder"),
    "index a list": (index(a=[1]), "cannot read model.safetensors.index.json"),
    "end token": (lambda f: options(f, GENERATION, eos_token_id=99999), "eos=99999: the model has tokens 0 to 261"),
    "negative": (lambda f: options(f, GENERATION, eos_token_id=[2, -5]), "eos=-5: the model has tokens 0 to 261"),
    "generation a list": (write(GENERATION, b"[1]"), "cannot read its generation_config.json"),
    "generation cut": (write(GENERATION, b'{"a'), "cannot read its generation_config.json"),
    "tokenizer a list": (write(TOKENIZER, b"[]"), "no tokenizer there"),
    "tokenizer cut": (write(TOKENIZER, b'{"a'), "no tokenizer there"),
    "options of the tokenizer": (write("tokenizer_config.json", b"[1]"), "no tokenizer there"),
    "template": (
        write("chat_template.jinja", b"{% for %}"),
        "its chat template (chat_template.jinja) is broken, line 1",
    ),
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
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    index(**{"model.norm.weight": "part.safetensors"})(folder)
    assert is_complete(folder)
    for content in (b"[1]", b"{", b'{"weight_map": 1}', b'{"weight_map": {"a": 1}}', b"\xff"):
        (folder / "model.safetensors.index.json").write_bytes(content)
        assert not is_complete(folder)
