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


CALL = "<tool_call>\n%s\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "calls", "malformed"),
    [
        (f"{JSON}{CALL % '{oops}'}{JSON}", [("multiply", {"a": 3, "b": 4})] * 2, True),
        (CALL % '{"name": "today"}', [("today", {})], False),
        (CALL % '{"name": "today", "arguments": null}', [("today", {})], False),
        (f"{CALL % '{oops}'}{CALL % chr(123)}", [], True),
        # As OpenAI's interface sends arguments.
        (CALL % r'{"name": "multiply", "arguments": "{\"a\": 3}"}', [("multiply", {"a": 3})], False),
        (CALL % '{"name": "multiply", "arguments": "3, 4"}', [("multiply", '"3, 4"')], False),
    ],
)
def test_each_call_is_read_alone(tokenizer, text: str, calls: list, malformed: bool):
    reader = ToolCallReader("hermes", tokenizer, [tokenizer.eos_token_id])
    assert reader.read(tokenizer(text, add_special_tokens=False).input_ids) == {"calls": calls, "malformed": malformed}


@pytest.mark.parametrize("depth", [63, 64, 500, 5000])
def test_deeply_nested_arguments_become_text(tokenizer, depth: int):
    reader = ToolCallReader("hermes", tokenizer, [tokenizer.eos_token_id])
    value = '{"a": ' + "[" * depth + "]" * depth + "}"
    text = CALL % ('{"name": "multiply", "arguments": ' + value + "}")
    found = reader.read(tokenizer(text, add_special_tokens=False).input_ids)
    assert [isinstance(arguments, dict) for _, arguments in found["calls"]] == ([depth < 64] if depth < 5000 else [])


def test_an_unknown_format_is_named(tokenizer):
    with pytest.raises(ConfigError, match="rollout.multi_turn.format='hermit': .*vLLM's parsers are .*hermes"):
        ToolCallReader("hermit", tokenizer, [])
