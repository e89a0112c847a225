"""What a model's folder holds besides its weights survives a checkpoint."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, dynamic_module_utils

from verl.workers.export import empty_model, write_architecture, write_huggingface


@pytest.fixture
def copied_model(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model's folder, to be altered."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def test_settings_that_transformers_warns_of_are_written_as_they_were(copied_model, tiny_tokenizer, tmp_path):
    # Without do_sample a temperature does nothing, and transformers refuses to save such a model.
    (copied_model / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "eos_token_id": [1, 2]}))
    weights = dict(AutoModelForCausalLM.from_pretrained(copied_model).named_parameters())
    shell = empty_model("actor", copied_model, False)
    write_architecture(shell, tiny_tokenizer, tmp_path / "architecture")
    again = empty_model("actor", tmp_path / "architecture", False)
    write_huggingface(again, {n: p.detach() for n, p in weights.items()}, tiny_tokenizer, tmp_path / "huggingface")
    for name in ("architecture", "huggingface"):
        written = json.loads((tmp_path / name / "generation_config.json").read_text())
        assert (written["temperature"], written["eos_token_id"]) == (0.6, [1, 2])


CONFIGURATION = """
from transformers import Qwen2Config

class MyConfig(Qwen2Config):
    model_type = "my_qwen"
"""
MODELING = """
from transformers import Qwen2ForCausalLM
from .configuration_my import MyConfig

class MyModel(Qwen2ForCausalLM):
    config_class = MyConfig
"""


def test_a_models_own_code_comes_along(copied_model, tiny_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    config = json.loads((copied_model / "config.json").read_text())
    names = {"AutoConfig": "configuration_my.MyConfig", "AutoModelForCausalLM": "modeling_my.MyModel"}
    (copied_model / "config.json").write_text(json.dumps(config | {"model_type": "my_qwen", "auto_map": names}))
    (copied_model / "configuration_my.py").write_text(CONFIGURATION)
    (copied_model / "modeling_my.py").write_text(MODELING)
    write_architecture(empty_model("actor", copied_model, True), tiny_tokenizer, tmp_path / "architecture")
    shutil.rmtree(copied_model)
    assert type(empty_model("actor", tmp_path / "architecture", True)).__name__ == "MyModel"
