import json

import pytest

from verl.config.errors import ConfigError
from verl.models.info import check_sequence_fits, end_tokens, sequence_limit


def test_the_models_longest_sequence(tiny_model, tmp_path):
    assert sequence_limit(str(tiny_model), trust_remote_code=False) == 512
    with pytest.raises(ConfigError, match="no model there"):
        sequence_limit(str(tmp_path), trust_remote_code=False)


def test_sequences_that_do_not_fit_are_named(tiny_model):
    check_sequence_fits("data.a+data.b", 512, "model.path", str(tiny_model), trust_remote_code=False)
    message = (
        r"^data.a\+data.b=513: model.path='.*' takes sequences of 512 tokens \(max_position_embeddings in its config"
    )
    with pytest.raises(ConfigError, match=message):
        check_sequence_fits("data.a+data.b", 513, "model.path", str(tiny_model), trust_remote_code=False)


def test_what_ends_a_response(tiny_model, tiny_tokenizer, tmp_path):
    own = tiny_tokenizer.eos_token_id
    config = json.loads((tiny_model / "config.json").read_text())

    def ends(in_config: object, in_generation: dict[str, object] | None, *further: int) -> list[int]:
        (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": in_config}))
        (tmp_path / "generation_config.json").unlink(missing_ok=True)
        if in_generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(in_generation))
        return end_tokens(str(tmp_path), tiny_tokenizer, False, further)

    assert ends(None, None) == [own]
    assert ends(own + 1, None) == [own, own + 1]
    assert ends([own + 1, own], None, own + 9) == [own, own + 1, own + 9]
    # The file of its own comes before the model's config, as in transformers.
    assert ends(own + 1, {"eos_token_id": own + 2}) == [own, own + 2]
    assert ends(own + 1, {"eos_token_id": [own + 3, own + 2], "temperature": 0.5, "do_sample": True}) == [
        own,
        own + 2,
        own + 3,
    ]
    assert ends(own + 1, {"do_sample": True}) == [own]
