"""Tokenizers of models, and models that read another's tokens."""

import copy
import shutil
from dataclasses import replace

import pytest
from tiny_tokenizer import make_tiny_tokenizer

from tests.kit import edit_vocabulary
from verl.models.tokenizer import (
    check_embeds_tokens,
    check_reads_tokens,
    check_reward_model_template,
    load_tokenizer,
    reward_model_batch,
)


def test_tokenizer_pads_by_default_with_the_end_of_sequence(refused, tmp_path):
    tokenizer = make_tiny_tokenizer()
    tokenizer.pad_token = tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with refused("model.path='TMP': ...needs a chat template and an end-of-sequence token..."):
        load_tokenizer(str(tmp_path), trust_remote_code=False)
    loaded = load_tokenizer(str(tmp_path), trust_remote_code=False, needs_chat_template=False)
    assert loaded.chat_template is None and loaded.pad_token_id == loaded.eos_token_id == 2


@pytest.mark.parametrize("config", ["", '{"model_type": "qwen2"}'], ids=["nothing", "a model's config alone"])
def test_folder_without_tokenizer_is_refused(config, refused, tmp_path):
    # The second looks to transformers like a tokenizer whose vocabulary is empty.
    if config:
        (tmp_path / "config.json").write_text(config)
    with refused("model.path='TMP': no tokenizer there..."):
        load_tokenizer(str(tmp_path), trust_remote_code=False)


def test_critic_must_read_tokens_as_the_policy_does(model_config, tiny_model, tiny_tokenizer, refused, tmp_path):
    edit_vocabulary(shutil.copytree(tiny_model, tmp_path / "critic"), swap=("a", "b"))
    a, b = tiny_tokenizer.convert_tokens_to_ids(["a", "b"])
    line = (
        "critic.model.path='TMP/critic': reads the policy's token numbers, but 2 of these 262 differ: "
        f"'a' is {a} for the policy and number {b} here; name a relative of the policy"
    )
    with refused(line):
        check_reads_tokens(replace(model_config, path=f"{tmp_path}/critic"), "critic.model.path", tiny_tokenizer)


def test_only_tokens_that_the_critic_lacks_are_refused(model_config, tiny_model, refused, tmp_path):
    policy, further = (load_tokenizer(str(tiny_model), False) for _ in range(2))
    further.add_tokens(["<another>"])
    further.save_pretrained(shutil.copytree(tiny_model, tmp_path / "critic"))
    critic = replace(model_config, path=str(tmp_path / "critic"))
    check_reads_tokens(critic, "critic.model.path", policy)
    with refused("...1 of these 263 differ: '<another>' is 262 for the policy and missing here..."):
        check_reads_tokens(model_config, "critic.model.path", further)


def test_every_token_needs_an_embedding(model_config, tiny_tokenizer, refused):
    check_embeds_tokens(model_config, "model.path", tiny_tokenizer)
    small = replace(model_config, override_config={"vocab_size": 261})
    with refused("model.path='...': the tokenizer has tokens up to number 261, the model embeddings for 261 (vocab..."):
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


def test_chat_template_of_a_reward_model_is_checked(tiny_tokenizer, refused):
    check_reward_model_template([PROMPT], tiny_tokenizer, "model")
    strict = copy.deepcopy(tiny_tokenizer)
    strict.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system message') }}{% endif %}"
        "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    )
    chats = [PROMPT, [{"role": "system", "content": "be brief"}, *PROMPT]]
    with refused("model: its chat template refuses the chat of prompt 1: no system message"):
        check_reward_model_template(chats, strict, "model")
    strict.chat_template = "{{ messages[0]['content'] }}"
    with refused("...leaves out the answer..."):
        check_reward_model_template([PROMPT], strict, "model")
