from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from verl.data.arithmetic import ArithmeticTask
from verl.data.tiny_tokenizer import CHARACTERS, SPECIAL_TOKENS, make_tiny_tokenizer

TOKENIZER = make_tiny_tokenizer()
CHAT = [{"role": "user", "content": "What is 1 + 1?"}, {"role": "assistant", "content": r"\boxed{2}"}]


def test_vocabulary():
    assert len(TOKENIZER) == 103
    assert TOKENIZER.convert_tokens_to_ids(SPECIAL_TOKENS) == list(range(7))
    assert (TOKENIZER.pad_token_id, TOKENIZER.unk_token_id, TOKENIZER.eos_token_id) == (0, 1, 3)


@given(st.text(alphabet=CHARACTERS, max_size=60))
def test_round_trip(text: str):
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    if "<|" not in text:
        assert len(ids) == len(text)


def test_other_characters_are_unknown():
    assert TOKENIZER.encode("a\u00e9\U0001f600") == [TOKENIZER.convert_tokens_to_ids("a"), 1, 1]
    assert TOKENIZER.encode("") == []


def test_special_tokens_are_left_out_of_the_text():
    ids = TOKENIZER.encode("<|assistant|>ab<|im_end|><|pad|>")
    assert len(ids) == 5
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == "ab"


@pytest.mark.parametrize(
    ("messages", "generation", "text"),
    [
        (CHAT[:1], True, "<|user|>What is 1 + 1?<|im_end|><|assistant|>"),
        (CHAT[:1], False, "<|user|>What is 1 + 1?<|im_end|>"),
        (CHAT, False, r"<|user|>What is 1 + 1?<|im_end|><|assistant|>\boxed{2}<|im_end|>"),
        (
            [{"role": "system", "content": "Be brief."}, *CHAT[:1]],
            True,
            "<|system|>Be brief.<|im_end|><|user|>What is 1 + 1?<|im_end|><|assistant|>",
        ),
    ],
)
def test_chat_template(messages: list[dict[str, str]], generation: bool, text: str):
    assert TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation) == text
    ids = TOKENIZER.apply_chat_template(messages, add_generation_prompt=generation, return_dict=False)
    assert TOKENIZER.decode(ids) == text


def test_save_and_load(tmp_path: Path):
    TOKENIZER.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert isinstance(loaded, PreTrainedTokenizerFast)
    assert loaded.get_vocab() == TOKENIZER.get_vocab()
    assert loaded.special_tokens_map == TOKENIZER.special_tokens_map
    assert loaded.decode(loaded.encode(CHARACTERS)) == CHARACTERS
    expected = TOKENIZER.apply_chat_template(CHAT, return_dict=False)
    assert loaded.apply_chat_template(CHAT, return_dict=False) == expected


def test_arithmetic_problems_fit_in_128_tokens():
    for problem in ArithmeticTask().split("train", 500, seed=0):
        chat = [{"role": "user", "content": problem.question}, {"role": "assistant", "content": problem.solution}]
        ids = TOKENIZER.apply_chat_template(chat, return_dict=False)
        assert 60 <= len(ids) <= 128
        assert 1 not in ids
