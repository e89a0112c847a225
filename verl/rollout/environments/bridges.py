"""Bridges between policy turns: tokens rendered from an environment's messages with the chat template.

The history is never re-rendered. The policy reads its earlier turns exactly as sampled. Each is followed by a bridge:
the text that the chat template places after an assistant turn.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from verl.config.errors import ConfigError
from verl.data.templates import render_chat_text

ANSWER = "[an answer of the assistant]"
"""Placeholder for the text of a policy turn. Chat templates must render it unchanged."""

Message = Mapping[str, Any]
"""Chat message with ``role``, ``content`` and any other keys that the template reads."""


class Bridges:
    """Tokens between turns, rendered with the tokenizer's chat template.

    Raises:
        ConfigError: If the template cannot append messages with ``role`` without changing the text before them.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, chat_arguments: Mapping[str, Any], role: str, field: str
    ) -> None:
        """Initialize the bridges and check that the chat template supports ``role``.

        Args:
            chat_arguments: Chat template arguments, which are also used for prompts.
            role: Role of the environment's messages; other roles are checked when they first occur.
            field: Name and value of the option that enables conversations, for error messages.
        """
        self.tokenizer, self.chat_arguments, self.field = tokenizer, chat_arguments, field
        self.head, self._checked = _ids(self.tokenizer, ANSWER), set[str]()
        self._check_role(role)

    def _check_role(self, role: str) -> None:
        self._checked.add(role)
        try:
            self._check({"role": role, "name": "tool", "content": "an observation"})
        except ConfigError as error:
            self._checked.discard(role)
            raise ConfigError(f"{self.field}: role {role!r}: {error}; give the model another chat template") from error

    def _check(self, message: Message) -> None:
        question, answer = {"role": "user", "content": "a question"}, {"role": "assistant", "content": ANSWER}
        shorter: list[Message] = [question]
        turn: list[Message] = [answer, message]
        for _ in range(2):
            before, _, _ = self._text(shorter, False).rpartition(shorter[-1]["content"])
            after = self._text([*shorter, *turn], False)
            if not after.startswith(before):
                raise ConfigError(
                    "the tokenizer's chat template writes earlier turns in another way once later ones follow"
                )
            if ANSWER not in after[len(before) :] or message["content"] not in after.rpartition(ANSWER)[2]:
                raise ConfigError("the tokenizer's chat template leaves out the turns before or after such a message")
            shorter = [*shorter, *turn]
        self.between([message])

    def between(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens between two policy turns, starting with the text that closes the first one.

        Raises:
            ConfigError: If the template rejects the messages or leaves out messages with one of their roles.
        """
        for role in sorted({message["role"] for message in messages} - self._checked):
            self._check_role(role)
        question = {"role": "user", "content": "a question"}
        text = self._text([question, {"role": "assistant", "content": ANSWER}, *messages], True)
        before, _, after = text.partition(ANSWER)
        ids = _ids(self.tokenizer, ANSWER + after)
        if not before or ids[: len(self.head)] != self.head:
            raise ConfigError("the tokenizer joins the end of a turn with what follows")
        return ids[len(self.head) :]

    def after(self, turn: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """Return the result of :meth:`between` without the leading tokens that ``turn`` already ends with."""
        bridge = self.between(messages)
        overlap = next((k for k in range(min(len(bridge), len(turn)), 0, -1) if list(turn[-k:]) == bridge[:k]), 0)
        return bridge[overlap:]

    def _text(self, messages: Sequence[Message], generation_prompt: bool) -> str:
        return render_chat_text(messages, self.tokenizer, self.chat_arguments, generation_prompt)


class ProgramBridges:
    """Bridges that pass a program's output to the policy in plain-text templates.

    If a turn already ends with the stop string ``BEGUN``, as most turns do, the bridge does not repeat it.
    """

    BEGUN = "```output"

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    def after(self, turn: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """Return the tokens to append to ``turn``: an output block that contains the messages."""
        written = str(self.tokenizer.decode(list(turn), skip_special_tokens=True))
        text = "" if written.endswith("\n") else "\n"
        text += "" if written.rstrip().endswith(self.BEGUN) else f"{self.BEGUN}\n"
        text += "\n".join(message["content"] for message in messages)
        return _ids(self.tokenizer, f"{text}\n```\n")


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    # A tool may return half of a surrogate pair, which models can write in JSON but tokenizers cannot encode.
    return list(tokenizer(text.encode(errors="replace").decode(), add_special_tokens=False).input_ids)
