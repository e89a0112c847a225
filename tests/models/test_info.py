"""What a model's config says, and how often it is read."""

import json
import re
import shutil
import sys
from collections import Counter
from dataclasses import replace

import pytest
from transformers import AutoConfig, LlamaConfig, T5Config

from tests.conftest import changed
from verl.config.errors import ConfigError
from verl.models.info import ModelInfo, check_length, check_sequence_fits, override_engine_config
from verl.trainer.logging.speed import ModelCost
from verl.trainer.ppo.run import run_ppo


def test_facts_of_a_model(tiny_model, tmp_path):
    info = ModelInfo.read(str(tiny_model), trust_remote_code=False)
    assert (info.num_layers, info.max_length, info.has_value_form) == (4, 512, True)
    assert info.causal_model.device.type == "meta" and info.causal_model.num_parameters() == 888_192
    T5Config(num_layers=1).save_pretrained(tmp_path / "t5")
    with pytest.raises(ConfigError, match="t5': its config.json describes no model: Unrecognized configuration class"):
        _ = ModelInfo.read(str(tmp_path / "t5"), False).causal_model
    with pytest.raises(ConfigError, match="cannot read its config.json: Unrecognized model"):
        ModelInfo.read(str(tmp_path), trust_remote_code=False)


def test_a_run_reads_each_models_config_once(small_config, tiny_model, tmp_path, monkeypatch):
    policy, critic, judge = (str(shutil.copytree(tiny_model, tmp_path / name)) for name in "pcj")
    model = replace(small_config.model, path=policy, gradient_checkpointing=True, use_remove_padding=True)
    reward_model = {"enable": True, "max_length": 64, "model": replace(model, path=judge)}
    parts = {"critic": {"model": replace(model, path=critic)}, "reward_model": reward_model}
    # The trainer's is checked last.
    parts |= {"algorithm": {"adv_estimator": "gae"}, "trainer": {"critic_warmup": 2}}
    config = changed(small_config, model=model, **parts)
    reads: Counter[str] = Counter()
    read = AutoConfig.from_pretrained

    def counted(path: str, **options: object):
        # Tokenizers, which transformers loads, read it too.
        if sys._getframe(1).f_globals["__name__"].startswith("verl."):
            reads[path] += 1
        return read(path, **options)

    monkeypatch.setattr(AutoConfig, "from_pretrained", counted)
    with pytest.raises(ConfigError, match="critic_warmup=2: the run has 2 steps"):
        run_ppo(config)
    ModelCost.of(config.model)
    ModelCost.of(config.critic.model).without_head(config.critic.model)
    assert reads == {policy: 1, critic: 1, judge: 1}


def test_sequences_that_do_not_fit_are_named(tiny_model, model_config):
    model = replace(model_config, path=str(tiny_model))
    check_sequence_fits("data.a+data.b", 512, "model.path", model)
    message = r"^data.a\+data.b=513: model.path='.*' takes sequences of 512 tokens \(max_position_embeddings in"
    with pytest.raises(ConfigError, match=message):
        check_sequence_fits("data.a+data.b", 513, "model.path", model)


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


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"max_position_embedings": 9},
            "max_position_embedings=9: qwen2 at .* has no such option; did you mean max_p",
        ),
        ({"model_type": "llama"}, "model_type='llama': .* a model keeps its architecture's options$"),
    ],
)
def test_values_that_a_model_does_not_have_are_named(model_config, overrides, message):
    with pytest.raises(ConfigError, match=rf"^model\.override_config\.{message}"):
        ModelInfo.of(replace(model_config, override_config=overrides))


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"hidden_size": "wide"}, "'hidden_size' expected int"),
        ({"num_hidden_layers": 2}, "`num_hidden_layers` .2. must"),
    ],
)
def test_values_that_an_architecture_refuses_are_one_line(model_config, overrides, reason):
    message = rf"^model\.override_config={re.escape(repr(overrides))}: qwen2 refuses it: .*{reason}.*$"
    with pytest.raises(ConfigError, match=message):
        ModelInfo.of(replace(model_config, override_config=overrides))
