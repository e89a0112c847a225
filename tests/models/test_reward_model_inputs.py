import copy

import pytest

from verl.config.errors import ConfigError
from verl.models.reward_model_inputs import check_reward_model_template, reward_model_batch

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
