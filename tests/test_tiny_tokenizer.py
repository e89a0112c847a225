"""The tokenizer of the embedded models."""

import unicodedata

from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizer import SPECIAL_TOKENS, make_tiny_tokenizer

TOKENIZER = make_tiny_tokenizer()
CHAT = [{"role": "user", "content": "What is 1 + 1?"}, {"role": "assistant", "content": r"\boxed{2}"}]


def test_vocabulary():
    assert len(TOKENIZER) == 262
    assert TOKENIZER.convert_tokens_to_ids(SPECIAL_TOKENS) == list(range(6))
    assert (TOKENIZER.pad_token_id, TOKENIZER.unk_token_id, TOKENIZER.eos_token_id) == (0, None, 2)


@given(st.text(max_size=60).map(lambda text: unicodedata.normalize("NFC", text)))
def test_round_trip(text: str):
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    if "<|" not in text:
        assert len(ids) == len(text.encode())


def test_chat_template():
    system = {"role": "system", "content": "Be brief."}
    for messages, generation, text in (
        (CHAT[:1], True, "<|user|>What is 1 + 1?<|im_end|><|assistant|>"),
        (CHAT, False, r"<|user|>What is 1 + 1?<|im_end|><|assistant|>\boxed{2}<|im_end|>"),
        ([system, *CHAT[:1]], False, "<|system|>Be brief.<|im_end|><|user|>What is 1 + 1?<|im_end|>"),
    ):
        ids = TOKENIZER.apply_chat_template(messages, add_generation_prompt=generation, return_dict=False)
        assert TOKENIZER.decode(ids) == text


def test_tool_conversation_is_few_tokens():
    tokenizer = make_tiny_tokenizer(tools=True)
    call = '<tool_call>{"name": "multiply", "arguments": {"a": 980, "b": 771}}</tool_call>'
    says = [("user", "What is 980 * 771?"), ("assistant", call), ("tool", "755580"), ("assistant", r"\boxed{755580}")]
    chat = [{"role": role, "content": text} for role, text in says]
    ids = tokenizer.apply_chat_template(chat, return_dict=False)
    assert len(ids) == 42 and len(tokenizer) == 271
    assert tokenizer.decode(ids) == "".join(f"<|{role}|>{text}<|im_end|>" for role, text in says)
