import json

import pytest
from tiny_tokenizer import make_tiny_tokenizer

from verl.config import ConfigError
from verl.models.tokenizer import load_tokenizer


def test_padding_falls_back_to_the_end_of_sequence_and_a_chat_template_is_needed(tmp_path):
    tokenizer = make_tiny_tokenizer()
    tokenizer.pad_token = tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"model.path=.*needs a chat template and an end-of-sequence token"):
        load_tokenizer(str(tmp_path), trust_remote_code=False)
    loaded = load_tokenizer(str(tmp_path), trust_remote_code=False, needs_chat_template=False)
    assert loaded.chat_template is None and loaded.pad_token_id == loaded.eos_token_id == 2


@pytest.mark.parametrize("config", [None, {"model_type": "qwen2"}], ids=["nothing", "a model's config alone"])
def test_a_folder_without_tokenizer_is_named(config, tmp_path):
    # The second looks to transformers like a tokenizer whose vocabulary is empty.
    if config:
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=rf"model.path='{tmp_path}': no tokenizer there"):
        load_tokenizer(str(tmp_path), trust_remote_code=False)
