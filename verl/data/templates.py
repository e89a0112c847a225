"""Prompt templates by name, for training and evaluation, with demonstrations if any.

A template is plain text. The special tokens in it (``<|im_start|>``) must be the model's own, so choose the template
that the model was trained with. ``chat`` and ``chat-boxed`` use the chat template of the tokenizer, and ``raw`` adds
nothing. docs/data.md says where each text comes from, and how it differs from that of the models of its name.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from verl.config.errors import ConfigError
from verl.rewards.answers import THINK

BOXED = "Please reason step by step, and put your final answer within \\boxed{}."

Demonstration = tuple[str, str]
"""A question and its worked answer."""


@dataclass(frozen=True)
class Template:
    """A prompt is ``head``; for each demonstration ``turn``, its answer and ``joint``; and then ``turn``."""

    turn: str
    """Contains ``{question}``; the response continues it."""
    head: str = ""
    joint: str = "\n\n"
    stops: tuple[str, ...] = ()
    """Strings that end a response, besides the model's end-of-sequence token, and are not part of it. If one is a token
    of the model, that token ends the response."""
    chat: bool = False
    """``turn`` is a user's message for the tokenizer's chat template; ``head`` and ``joint`` are not used."""

    @property
    def instruction(self) -> str:
        """What it adds to a question to ask for an answer in a box; empty if it asks for none."""
        return BOXED if BOXED in self.head + self.turn else ""


_QWEN_END = ("<|im_end|>", "<|endoftext|>")
_BOXED_QUESTION = f"{{question}}\n{BOXED}"


def _qwen(system: str, user: str = "{question}") -> Template:
    turn = f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"
    return Template(turn, f"<|im_start|>system\n{system}<|im_end|>\n", "<|im_end|>\n", _QWEN_END)


def _llama(user: str = "{question}") -> Template:
    turn = f"<|start_header_id|>user<|end_header_id|>\n\n{user}<|eot_id|>"
    answer = "<|start_header_id|>assistant<|end_header_id|>\n\n"
    return Template(turn + answer, joint="<|eot_id|>", stops=("<|eot_id|>", "<|start_header_id|>"))


_ASSISTANT = "You are a helpful assistant."
_R1_ZERO = (
    "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The assistant "
    "first thinks about the reasoning process in the mind and then provides the user with the answer. The reasoning "
    "process and answer are enclosed within <think> </think> and <answer> </answer> tags, respectively, i.e., <think> "
    "reasoning process here </think> <answer> answer here </answer>."
)
_NEXT_QUESTION = ("\nQuestion:", "\nProblem:")
"""What a base model tends to write after its answer."""

TEMPLATES: dict[str, Template] = {
    "chat": Template("{question}", chat=True),
    "chat-boxed": Template(f"{{question}}\n{BOXED}", chat=True),
    "raw": Template("{question}"),
    "plain": Template("{question}\n", stops=_NEXT_QUESTION),
    "plain-boxed": Template(f"{{question}}\n{BOXED}\n", stops=_NEXT_QUESTION),
    "question-answer": Template("Question: {question}\nAnswer:", stops=_NEXT_QUESTION),
    "step-by-step": Template("Question: {question}\nAnswer: Let's think step by step.", stops=_NEXT_QUESTION),
    "qwen": _qwen(_ASSISTANT),
    "qwen-boxed": _qwen(_ASSISTANT, _BOXED_QUESTION),
    "qwen25": _qwen(f"You are Qwen, created by Alibaba Cloud. {_ASSISTANT}"),
    "qwen25-math-cot": _qwen(BOXED),
    "abel": Template(
        "Question:\n{question}\nAnswer:\nLet's think step by step.\n", stops=("\nQuestion:", *_QWEN_END, "</s>")
    ),
    "deepseek-math": Template(f"User: {{question}}\n{BOXED}\n\nAssistant:", stops=("\nUser:", "<｜end▁of▁sentence｜>")),
    "deepseek-r1": Template(
        f"<｜User｜>{{question}}\n{BOXED}<｜Assistant｜><think>\n",
        joint="<｜end▁of▁sentence｜>",
        stops=("<｜end▁of▁sentence｜>", "<｜User｜>"),
    ),
    "r1-zero": Template(f"{_R1_ZERO} User: {{question}}. Assistant:", stops=("User:", "Assistant:")),
    "mathstral": Template(f"{{question}}\n{BOXED}", stops=("</s>", "[INST]")),
    "mistral": Template(f"[INST] {{question}}\n{BOXED} [/INST]", joint="</s>", stops=("</s>", "[INST]")),
    "llama": _llama(),
    "llama-boxed": _llama(_BOXED_QUESTION),
}
"""Name -> template."""


def find_template(name: str, field: str = "template") -> Template:
    """The template ``name``, the value of ``field``. Raises ``ConfigError`` naming the most similar one, or all."""
    if name not in TEMPLATES:
        near = get_close_matches(name, list(TEMPLATES), n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"must be one of {', '.join(TEMPLATES)}"
        raise ConfigError(f"{field}={name!r}: no such template; {hint}")
    return TEMPLATES[name]


def template_stops(name: str) -> list[str]:
    """The strings that end a response; see ``Template.stops``. Raises ``ConfigError`` as ``find_template``."""
    return list(find_template(name).stops)


def stop_token_ids(name: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that end a response: the strings of :func:`template_stops` that are single tokens of the model.

    Engines compare stop strings with the text, which has no special tokens. So a base model with another
    end-of-sequence token would continue after its ``<|im_end|>``.
    """
    vocabulary = tokenizer.get_vocab()
    return [vocabulary[stop] for stop in template_stops(name) if stop in vocabulary]


def stop_strings(name: str, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The strings of :func:`template_stops` that text can hold: those that are no special tokens of the model."""
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return [stop for stop in template_stops(name) if stop not in special]


def check_template(name: str, tokenizer: PreTrainedTokenizerBase, field: str) -> None:
    """Raise ``ConfigError`` naming the option ``field`` unless the template exists and the tokenizer supports it."""
    if find_template(name, field).chat and tokenizer.chat_template is None:
        others = [other for other, form in TEMPLATES.items() if not form.chat]
        raise ConfigError(
            f"{field}={name!r}: the model's tokenizer has no chat template; set {field}=raw for prompts that are "
            f"already in the model's form, or one of {', '.join(others)}"
        )


def opens_thought(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a prompt ends in ``<think>``, as templates of reasoning models do: its response begins in a thought."""
    return str(tokenizer.decode(list(ids[-8:]))).rstrip().endswith(THINK)


def render_prompt(
    template: str,
    question: str,
    tokenizer: PreTrainedTokenizerBase,
    demonstrations: Sequence[Demonstration] = (),
    chat_arguments: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of the prompt for ``question``, after ``demonstrations`` in the same form.

    Args:
        chat_arguments: further arguments of the tokenizer's chat template, where the template uses it.

    Raises:
        ConfigError: there is no such template; or it uses the tokenizer's chat template, and the tokenizer has none or
            refuses the chat.
    """
    form = find_template(template)
    if form.chat:
        check_template(template, tokenizer, "template")
        return render_chat(_messages(form, question, demonstrations), tokenizer, chat_arguments)
    # Only the beginning-of-sequence token: a tokenizer may also add tokens at the end, after which no model continues.
    start = [token for token in tokenizer("").input_ids if token == tokenizer.bos_token_id]
    ids = list(tokenizer(_text(form, question, demonstrations), add_special_tokens=False).input_ids)
    # Text that was rendered by a chat template may begin with that token.
    return ids if start and ids[: len(start)] == start else [*start, *ids]


def render_chat(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    chat_arguments: Mapping[str, Any] | None = None,
    generation_prompt: bool = True,
) -> list[int]:
    """Token ids of a chat by the tokenizer's own template, with ``generation_prompt`` up to where an answer begins.

    Raises:
        ConfigError: the template refuses the chat, such as one with a system message, or fails on it.
    """
    options: Any = {**(chat_arguments or {}), "add_generation_prompt": generation_prompt, "return_dict": False}
    try:
        return list(tokenizer.apply_chat_template([dict(message) for message in messages], **options))
    except TemplateError as error:
        raise ConfigError(f"the tokenizer's chat template refuses the chat: {error}") from error
    except Exception as error:  # a template is a program of the model's, and may fail on arguments of the wrong type
        given = f" with apply_chat_template_kwargs={dict(chat_arguments)}" if chat_arguments else ""
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ConfigError(f"the tokenizer's chat template fails on the chat{given}: {reason}") from error


_MARKERS = re.compile(
    r"<\|im_start\|>|<\|start_header_id\|>|<start_of_turn>|<｜User｜>|<\|user\|>|\[INST\]"
    r"|\AA conversation between User and Assistant\."
    r"|\A(Question|Problem|User|Human|### Instruction|### Problem):.*"
    r"\n *(Answer|Solution|Assistant|### Response|### Solution):",
    re.DOTALL,
)


def template_marker(text: str) -> str | None:
    """A sign that ``text`` already is in the form of some template, such as ``<|im_start|>``; None if there is none."""
    found = _MARKERS.search(text)
    return None if found is None else f"{found.group(1)}: ... {found.group(2)}:" if found.group(1) else found.group()


def _text(form: Template, question: str, demonstrations: Sequence[Demonstration]) -> str:
    space = "" if form.turn.endswith(("\n", "]", ">")) else " "
    shown = [f"{_fill(form.turn, asked)}{space}{answer}{form.joint}" for asked, answer in demonstrations]
    return form.head + "".join(shown) + _fill(form.turn, question)


def _fill(turn: str, question: str) -> str:
    # Not str.format, because questions and instructions contain braces.
    return turn.replace("{question}", question, 1)


def _messages(form: Template, question: str, demonstrations: Sequence[Demonstration]) -> list[dict[str, str]]:
    messages = []
    for asked, answer in demonstrations:
        messages.append({"role": "user", "content": _fill(form.turn, asked)})
        messages.append({"role": "assistant", "content": answer})
    return [*messages, {"role": "user", "content": _fill(form.turn, question)}]
