"""Prompt templates, and few-shot demonstrations for base models.

The texts are in ``templates.yaml`` and ``demonstrations.yaml``. Use the template that the model was trained with,
because special tokens such as ``<|im_start|>`` must match. ``chat`` and ``chat-boxed`` use the tokenizer's chat
template, and ``raw`` leaves prompts unchanged.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import cycle
from pathlib import Path
from typing import Any, Literal

import yaml
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from verl.config.errors import ConfigError
from verl.utils.portable import valid_unicode
from verl.verifiers.answers import THINK

BOXED = "Please reason step by step, and put your final answer within \\boxed{}."

Demonstration = tuple[str, str]
"""A question and a worked answer."""
Chat = Sequence[Mapping[str, Any]]
"""Messages of a chat."""
Arguments = Mapping[str, Any] | None
"""Additional arguments of a chat template."""


@dataclass(frozen=True)
class Template:
    """The text around a question. For the fields, see ``templates.yaml``."""

    turn: str
    head: str = ""
    joint: str = "\n\n"
    stops: Sequence[str] = ()
    chat: bool = False
    python: Literal["", "output", "solution"] = ""

    @property
    def instruction(self) -> str:
        """Instruction to box the answer, or an empty string if there is none."""
        return BOXED if BOXED in self.head + self.turn else ""


def _read(name: str) -> dict[str, Any]:
    text = Path(__file__).with_name(f"{name}.yaml").read_text(encoding="utf-8")
    table: dict[str, Any] = yaml.safe_load(text.replace("{boxed}", BOXED.replace("\\", "\\\\")))
    return table


TEMPLATES = {name: Template(**fields) for name, fields in _read("templates").items()}
"""Name -> template."""

DEMONSTRATIONS: dict[str, list[Demonstration]] = {
    name: [(example["question"], example["answer"]) for example in examples]
    for name, examples in _read("demonstrations").items()
}
"""Maps values of ``Benchmark.demonstrations`` to questions with worked answers."""


def find_template(name: str, field: str = "template") -> Template:
    """Return the template ``name``. Raises a ``ConfigError`` that names ``field`` if the template does not exist."""
    if name not in TEMPLATES:
        near = get_close_matches(name, list(TEMPLATES), n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"must be one of {', '.join(TEMPLATES)}"
        raise ConfigError(f"{field}={name!r}: no such template; {hint}")
    return TEMPLATES[name]


def template_stops(name: str) -> list[str]:
    """Return the template's stop strings. Raises ``ConfigError`` if the template does not exist."""
    return list(find_template(name).stops)


def stop_token_ids(name: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token ids of the :func:`template_stops` that are single tokens of the model.

    Engines search for stop strings in text without special tokens, and would therefore miss ``<|im_end|>`` if it is not
    the model's end-of-sequence token.
    """
    vocabulary = tokenizer.get_vocab()
    return [vocabulary[stop] for stop in template_stops(name) if stop in vocabulary]


def stop_strings(name: str, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the :func:`template_stops` that are not special tokens of the model."""
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return [stop for stop in template_stops(name) if stop not in special]


def check_template(name: str, tokenizer: PreTrainedTokenizerBase, field: str) -> None:
    """Raise a ``ConfigError`` that names ``field`` if the template is unknown or unsupported by the tokenizer."""
    if find_template(name, field).chat and tokenizer.chat_template is None:
        others = [other for other, form in TEMPLATES.items() if not form.chat]
        raise ConfigError(
            f"{field}={name!r}: the model's tokenizer has no chat template; set {field}=raw for prompts that are "
            f"already in the model's form, or one of {', '.join(others)}"
        )


def opens_thought(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a prompt ends with ``<think>``, as with templates of reasoning models."""
    return str(tokenizer.decode(list(ids[-8:]))).rstrip().endswith(THINK)


def render_prompt(
    template: str,
    question: str,
    tokenizer: PreTrainedTokenizerBase,
    demonstrations: Sequence[Demonstration] = (),
    chat_arguments: Mapping[str, Any] | None = None,
) -> list[int]:
    """Return the token ids of the prompt for ``question``, preceded by ``demonstrations`` in the same format.

    Args:
        chat_arguments: additional arguments for the tokenizer's chat template, if ``template`` uses it.

    Raises ``ConfigError`` if the template does not exist, or if it needs a chat template that is missing or fails.
    """
    form = find_template(template)
    if form.chat:
        check_template(template, tokenizer, "template")
        turns = [text for example, answer in demonstrations for text in (_fill(form, example), answer)]
        pairs = zip(cycle(("user", "assistant")), [*turns, _fill(form, question)], strict=False)
        return render_chat([{"role": role, "content": text} for role, text in pairs], tokenizer, chat_arguments)
    # Add only the beginning-of-sequence token. Some tokenizers also append an end token, which would stop generation.
    start = [token for token in tokenizer("").input_ids if token == tokenizer.bos_token_id]
    ids = list(tokenizer(_text(form, question, demonstrations), add_special_tokens=False).input_ids)
    # Text rendered by a chat template may already start with this token.
    return ids if start and ids[: len(start)] == start else [*start, *ids]


def render_chat(
    messages: Chat, tokenizer: PreTrainedTokenizerBase, chat_arguments: Arguments = None, generation_prompt: bool = True
) -> list[int]:
    """Return the token ids of a chat rendered by the tokenizer's template, with a generation prompt if requested.

    Raises ``ConfigError`` if the template fails or rejects the chat, for example because of a system message.
    """
    rendered: list[int] = list(_rendered(messages, tokenizer, chat_arguments, generation_prompt, return_dict=False))
    return rendered


def render_untrusted(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token ids of a single user message in which special tokens are treated as plain text.

    Raises ``ConfigError`` if the tokenizer's chat template fails or omits the message.
    """
    mark = hashlib.blake2b(text.encode(errors="surrogatepass")).hexdigest()
    before, found, after = render_chat_text([{"role": "user", "content": mark}], tokenizer, None, True).partition(mark)
    if not found:
        raise ConfigError("the tokenizer's chat template leaves out the user's message")
    parts = [(before, False), (valid_unicode(text), True), (after, False)]
    return [
        token
        for part, is_plain in parts
        for token in tokenizer(part, add_special_tokens=False, split_special_tokens=is_plain).input_ids
    ]


def render_record(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[Mapping[str, Any]],
    chat_arguments: Mapping[str, Any],
    generation_prompt: bool = True,
) -> list[int]:
    """Like :func:`render_chat`, but raise ``ConfigError`` if the template omits the ``tools`` or tool calls."""
    arguments = {**chat_arguments, "tools": tools} if tools else chat_arguments
    ids = render_chat(messages, tokenizer, arguments, generation_prompt)
    silent = [{**message, "tool_calls": [], "content": message["content"] or ""} for message in messages]
    calls = any(message.get("tool_calls") for message in messages)
    no_tools = {**chat_arguments, "tools": None}
    for part, held, chat, given in (("tools", tools, messages, no_tools), ("tool_calls", calls, silent, arguments)):
        if held and ids == render_chat(chat, tokenizer, given, generation_prompt):
            raise ConfigError(f"the tokenizer's chat template leaves out {part}; use a model with a template for them")
    return ids


def render_chat_text(
    messages: Chat, tokenizer: PreTrainedTokenizerBase, chat_arguments: Arguments, generation_prompt: bool
) -> str:
    """Return the text that :func:`render_chat` tokenizes. Raises the same errors."""
    return str(_rendered(messages, tokenizer, chat_arguments, generation_prompt, tokenize=False))


def _rendered(
    messages: Chat, tokenizer: PreTrainedTokenizerBase, chat_arguments: Arguments, generation_prompt: bool, **form: bool
) -> Any:
    options: Any = {**(chat_arguments or {}), "add_generation_prompt": generation_prompt, **form}
    try:
        try:
            return tokenizer.apply_chat_template([dict(message) for message in messages], **options)
        except TypeError:  # Some templates, such as DeepSeek's, take the arguments of calls as text.
            return tokenizer.apply_chat_template(_with_text_arguments(list(messages)), **options)
    except TemplateError as error:
        raise ConfigError(f"the tokenizer's chat template refuses the chat: {error}") from error
    except Exception as error:  # A template is a program, and may fail on arguments of the wrong type.
        arguments = f" with apply_chat_template_kwargs={dict(chat_arguments)}" if chat_arguments else ""
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ConfigError(f"the tokenizer's chat template fails on the chat{arguments}: {reason}") from error


def _with_text_arguments(value: Any) -> Any:
    if isinstance(value, dict):
        as_text = {"arguments": json.dumps(value["arguments"], ensure_ascii=False)} if "arguments" in value else {}
        return {key: _with_text_arguments(entry) for key, entry in value.items()} | as_text
    return [_with_text_arguments(entry) for entry in value] if isinstance(value, list) else value


_MARKERS = re.compile(
    r"<\|im_start\|>|<\|start_header_id\|>|<start_of_turn>|<｜User｜>|<\|user\|>|\[INST\]|\[Round 0\] USER:"
    r"|\AA conversation between User and Assistant\.|\AIntegrate step-by-step reasoning|\A## Question\n"
    r"|\A(Question|Problem|User|Human|### Instruction|### Problem):.*"
    r"\n *(Answer|Solution|Assistant|### Response|### Solution):",
    re.DOTALL,
)


def template_marker(text: str) -> str | None:
    """Return the first template marker in ``text``, such as ``<|im_start|>``, or None if there is none."""
    match = _MARKERS.search(text)
    return None if match is None else f"{match.group(1)}: ... {match.group(2)}:" if match.group(1) else match.group()


def _text(form: Template, question: str, demonstrations: Sequence[Demonstration]) -> str:
    space = "" if form.turn.endswith(("\n", "]", ">")) else " "
    shots = [f"{_fill(form, example)}{space}{answer}{form.joint}" for example, answer in demonstrations]
    return form.head + "".join(shots) + _fill(form, question)


def _fill(form: Template, question: str) -> str:
    # str.format would fail on braces in questions and instructions.
    return form.turn.replace("{question}", question, 1)
