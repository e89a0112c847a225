"""Chats as data files hold them: lists of messages, each with a role and a content."""

from typing import Any

from verl.config.errors import ConfigError


def read_chat(value: Any, where: str, key: str, option: str, what: str = "prompt") -> list[dict[str, Any]]:
    """The chat in the column ``key``, a list of messages; ``what`` it is called in messages.

    Raises:
        ConfigError: it has another form or is empty; names ``where``, the column and ``option``, which names the
            column.
    """
    if not isinstance(value, list) or not all(
        isinstance(message, dict) and {"role", "content"} <= message.keys() for message in value
    ):
        raise ConfigError(
            f"{where}: {key}={value!r:.80}: must be {'text or ' * (what == 'prompt')}a list of messages, each with "
            f"role and content; set {option} if the {what} is in another column"
        )
    for message in value:
        for part in ("role", "content"):
            if not (isinstance(message[part], str) and is_unicode(message[part])):
                raise ConfigError(f"{where}: {key}: the {part} of a message must be text: {message[part]!r:.80}")
    if not any(message["content"].strip() for message in value):
        raise ConfigError(f"{where}: {key}: the {what} is empty; remove the row")
    return value


def is_unicode(text: str) -> bool:
    """Whether a text can be encoded: JSON may hold half of a surrogate pair, which no tokenizer takes."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
