"""Calls in the tokens of a turn, as vLLM's parsers find them."""

import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer

from tests.conftest import ROOT
from verl.config.errors import ConfigError
from verl.rollout.environments.tool_parser import ToolCallReader

JSON = '<tool_call>\n{"name": "multiply", "arguments": {"a": 3, "b": 4}}\n</tool_call>'
XML = (
    "<tool_call>\n<function=multiply>\n<parameter=a>\n3\n</parameter>\n<parameter=b>\n4\n</parameter>\n</function>\n"
    "</tool_call>"
)


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "data/tiny_tool_model")
    tokenizer.add_tokens([AddedToken(mark, special=True) for mark in ("<think>", "</think>")])
    return tokenizer


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("hermes", JSON, {"a": 3, "b": 4}),
        # Its parser remembers what it has read.
        ("granite4", JSON, {"a": 3, "b": 4}),
        # Numbers as text, which the tool's schema makes numbers of (``with_types``).
        ("qwen3_coder", XML, {"a": "3", "b": "4"}),
    ],
)
def test_every_turn_is_read_alike(tokenizer, name: str, text: str, arguments: dict[str, object]):
    reader = ToolCallReader(name, tokenizer, [tokenizer.eos_token_id])
    called = {"calls": [("multiply", arguments)], "malformed": False}
    turns = [f"so: {text}<|im_end|>", "12<|im_end|>", text, *([JSON[:40]] if text == JSON else [])]
    found = [reader.read(tokenizer(turn, add_special_tokens=False).input_ids) for turn in turns]
    nothing = {"calls": [], "malformed": False}
    assert found == [called, nothing, called, nothing | {"malformed": True}][: len(turns)]


def test_an_unknown_format_is_named(tokenizer):
    with pytest.raises(ConfigError, match="rollout.multi_turn.format='hermit': .*vLLM's parsers are .*hermes"):
        ToolCallReader("hermit", tokenizer, [])
