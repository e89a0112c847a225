"""Extracts tool calls from the text of a turn with vLLM's parsers."""

import copy
import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from transformers import PreTrainedTokenizerBase
from vllm.tool_parsers import ToolParserManager

from verl.config.errors import ConfigError
from verl.rollout.environments.tools import read_arguments

FIELD = "rollout.multi_turn.format"

MARKS = ("tool_call_start_token", "bot_token", "tool_calls_start_token", "TOOL_CALL_BEGIN", "bot_string", "tc_start")
"""Names of the parser attributes that may store the marker at the start of a tool call."""


class ToolCallReader:
    """Parser of the tool calls in a turn.

    Raises:
        ConfigError: If vLLM has no parser with this name, or the parser does not support the tokenizer.
    """

    def __init__(self, name: str, tokenizer: PreTrainedTokenizerBase, end_tokens: Sequence[int]) -> None:
        # Parsers log every text that they cannot parse, with a stack trace.
        for package in ("vllm.tool_parsers", "vllm.parser"):
            logging.getLogger(package).setLevel(logging.CRITICAL)
        try:
            parser: Any = ToolParserManager.get_tool_parser(name)
            self.parser = parser(tokenizer)
        except Exception as error:  # parsers raise various exceptions for unsupported tokenizers
            known = ", ".join(sorted({*ToolParserManager.tool_parsers, *ToolParserManager.lazy_parsers}))
            raise ConfigError(f"{FIELD}={name!r}: {error}; vLLM's parsers are {known}") from error
        self.tokenizer = tokenizer
        marks = (getattr(self.parser, mark, None) for mark in MARKS)
        self.mark = next((mark for mark in marks if isinstance(mark, str) and mark), None)
        self.ends = set(end_tokens)

    def read(self, tokens: list[int]) -> dict[str, Any]:
        """Return the ``calls`` as (name, arguments) pairs, and whether any call in the turn is ``malformed``."""
        tokens = tokens[:-1] if tokens and tokens[-1] in self.ends else tokens
        # Keep special tokens, because call markers may be special tokens.
        text = str(self.tokenizer.decode(tokens, skip_special_tokens=False))
        calls = self._parsed(text)
        if calls or self.mark is None or self.mark not in text:
            return {"calls": calls, "malformed": False}
        # Most parsers drop all calls if one is malformed, so parse each call separately.
        each = [self._parsed(self.mark + part) or _plain_call(part) for part in text.split(self.mark)[1:]]
        return {"calls": [call for calls in each for call in calls], "malformed": not all(each)}

    def _parsed(self, text: str) -> list[tuple[str, Any]]:
        try:
            # Use a fresh copy per response, because some parsers keep state.
            parsed = copy.copy(self.parser).extract_tool_calls(text, request=None).tool_calls
            return [(str(call.function.name), read_arguments(call.function.arguments)) for call in parsed]
        except Exception:  # a parser may fail on malformed model output
            return []


def _plain_call(text: str) -> list[tuple[str, Any]]:
    """Return the call at the start of ``text`` if it is a JSON object with a name. Arguments are optional."""
    with suppress(ValueError, RecursionError):
        call, _ = json.JSONDecoder().raw_decode(text.lstrip())
        if isinstance(call, dict) and isinstance(call.get("name"), str):
            return [(call["name"], read_arguments(call.get("arguments", call.get("parameters")) or {}))]
    return []
