"""The text of a response that verifiers read."""

import pytest
from tiny_tokenizer import make_tiny_tokenizer

from verl.data.responses import cut_at_stop, decode_responses, token_pieces


@pytest.mark.parametrize("special", [True, False])
def test_special_thought_tags_stay_in_the_text(special: bool):
    tokenizer = make_tiny_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"], special_tokens=special)
    texts = ["<think>7 or é?</think></think> 8<|im_end|>", "9<|im_end|>", ""]
    responses = [tokenizer(text)["input_ids"] for text in texts]
    assert decode_responses(responses, tokenizer) == ["<think>7 or é?</think></think> 8", "9", ""]
    assert decode_responses(responses, tokenizer, ["or", "9"]) == ["<think>7 ", "", ""]


@pytest.mark.parametrize(
    ("text", "strings", "expected"),
    [("7 #### 8", ["####"], "7 "), ("7 b a", ["a", "b"], "7 "), ("7", ["a"], "7"), ("a7", [], "a7"), ("a", ["a"], "")],
)
def test_scored_text_ends_before_the_stop_string(text, strings, expected):
    assert cut_at_stop(text, strings) == expected


@pytest.mark.parametrize("text", ["7 + é😀 = <|im_end|>", "", "<|im_end|><|im_end|>", "日本語 ok"])
def test_token_pieces_make_up_the_text(text: str):
    tokenizer = make_tiny_tokenizer()
    ids = tokenizer(text)["input_ids"]
    pieces = token_pieces(ids, tokenizer)
    assert len(pieces) == len(ids) and "".join(pieces) == tokenizer.decode(ids)


def test_character_comes_with_its_last_token():
    tokenizer = make_tiny_tokenizer()
    ids = tokenizer("7é8")["input_ids"]
    assert token_pieces(ids, tokenizer) == ["7", "", "é", "8"]
    # A response that was cut inside a character.
    assert token_pieces(ids[:2], tokenizer) == ["7", "\ufffd"]


def test_invalid_bytes_take_linear_time():
    tokenizer = make_tiny_tokenizer()
    no_character = tokenizer("é")["input_ids"][:1]
    ids = [*(no_character * 300), *tokenizer("7é")["input_ids"], *no_character]
    read = []

    class Counting:
        def decode(self, own: list[int]) -> str:
            read.append(len(own))
            return tokenizer.decode(own)

    pieces = token_pieces(ids, Counting())
    assert len(pieces) == len(ids) and "".join(pieces) == tokenizer.decode(ids) == "\ufffd" * 300 + "7é\ufffd"
    assert max(read) < 20
