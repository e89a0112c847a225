import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_tokenizer import make_tiny_tokenizer

from verl.config import ConfigError
from verl.models.tokenizer import (
    check_embeds_tokens,
    check_reads_tokens,
    check_reward_model_template,
    load_tokenizer,
    reward_model_batch,
)


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


@pytest.fixture
def relative(tiny_model, tmp_path):
    """A copy of the tiny model whose vocabulary, token -> number, was altered."""

    def relative(alter) -> Path:
        shutil.copytree(tiny_model, tmp_path / "relative")
        path = tmp_path / "relative" / "tokenizer.json"
        state = json.loads(path.read_text())
        alter(state["model"]["vocab"])
        path.write_text(json.dumps(state))
        return path.parent

    return relative


def swap(vocabulary: dict[str, int]) -> None:
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


def test_a_critic_must_read_every_token_of_the_policy_as_the_policy_does(model_config, tiny_tokenizer, relative):
    critic = replace(model_config, path=str(relative(swap)))
    ids = tiny_tokenizer.convert_tokens_to_ids(["a", "b"])
    message = rf"reads the policy's token numbers, but 2 of these 262 differ: 'a' is {ids[0]} for .* number {ids[1]} "
    with pytest.raises(ConfigError, match=rf"^critic\.model\.path='.*': {message}here; name a relative of the policy$"):
        check_reads_tokens(critic, "critic.model.path", tiny_tokenizer)


def test_tokens_that_only_the_critic_has_do_no_harm_and_those_that_it_lacks_do(model_config, tiny_model, tmp_path):
    policy, further = (load_tokenizer(str(tiny_model), False) for _ in range(2))
    further.add_tokens(["<another>"])
    shutil.copytree(tiny_model, tmp_path / "critic")
    further.save_pretrained(tmp_path / "critic")
    critic = replace(model_config, path=str(tmp_path / "critic"))
    check_reads_tokens(critic, "critic.model.path", policy)
    with pytest.raises(ConfigError, match="1 of these 263 differ: '<another>' is 262 for the policy and missing here"):
        check_reads_tokens(model_config, "critic.model.path", further)


def test_every_token_needs_an_embedding(model_config, tiny_tokenizer):
    check_embeds_tokens(model_config, "model.path", tiny_tokenizer)
    small = replace(model_config, override_config={"vocab_size": 261})
    message = r"^model\.path='.*': the tokenizer has tokens up to number 261, the model embeddings for 261 \(vocab"
    with pytest.raises(ConfigError, match=message):
        check_embeds_tokens(small, "model.path", tiny_tokenizer)


PROMPT = [{"role": "user", "content": "1+2"}]


def test_conversations_are_rendered_whole(tiny_tokenizer):
    batch, too_long = reward_model_batch([PROMPT, PROMPT], ["3", "1+2=3"], tiny_tokenizer, max_length=64)
    assert too_long == 0
    expected = [
        tiny_tokenizer.apply_chat_template([*PROMPT, {"role": "assistant", "content": text}], return_dict=False)
        for text in ("3", "1+2=3")
    ]
    assert [text.tokens.tolist() for text in batch.split(1)] == expected
    assert not batch.prompt_lengths.any()


def test_long_conversations_lose_their_head(tiny_tokenizer):
    whole, _ = reward_model_batch([PROMPT], ["1+2=3"], tiny_tokenizer, max_length=64)
    cut, too_long = reward_model_batch([PROMPT] * 2, ["1+2=3", "1+2=3"], tiny_tokenizer, max_length=4)
    assert cut.tokens.tolist() == whole.tokens[-4:].tolist() * 2 and too_long == 1


def test_a_template_that_refuses_a_chat_is_found(tiny_tokenizer):
    check_reward_model_template([PROMPT], tiny_tokenizer, "model")
    strict = copy.deepcopy(tiny_tokenizer)
    strict.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system message') }}{% endif %}"
        "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    )
    chats = [PROMPT, [{"role": "system", "content": "be brief"}, *PROMPT]]
    with pytest.raises(ConfigError, match="^model: its chat template refuses the chat of prompt 1: no system message$"):
        check_reward_model_template(chats, strict, "model")
    strict.chat_template = "{{ messages[0]['content'] }}"
    with pytest.raises(ConfigError, match="leaves out the answer"):
        check_reward_model_template([PROMPT], strict, "model")
