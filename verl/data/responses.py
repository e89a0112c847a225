"""Decodes responses to text."""

from collections.abc import Sequence
from itertools import groupby

from transformers import PreTrainedTokenizerBase

from verl.verifiers.answers import END_OF_THINK, THINK


def decode_responses(
    responses: Sequence[list[int]], tokenizer: PreTrainedTokenizerBase, stop_strings: Sequence[str] = ()
) -> list[str]:
    """Decode ``responses`` without special tokens, and cut each response at the first stop string.

    ``<think>`` and ``</think>`` are kept even if they are special tokens, because verifiers look for them.
    """
    added = tokenizer.added_tokens_decoder.items()
    tags = {i: token.content for i, token in added if token.special and token.content in (THINK, END_OF_THINK)}
    if not tags:
        texts = list(tokenizer.batch_decode(list(responses), skip_special_tokens=True))
    else:
        texts = [_decode_with_tags(ids, tokenizer, tags) for ids in responses]
    return [cut_at_stop(text, stop_strings) for text in texts]


MAX_INCOMPLETE = 8
"""Number of consecutive tokens without a complete character after which their bytes are treated as invalid."""


def token_pieces(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the text of each token, including special tokens. The concatenated texts form the whole text.

    A character that spans several tokens is assigned to the last of these tokens.
    """
    pieces, start, read = [], 0, 0
    for end in range(1, len(ids) + 1):
        # Decode from ``start``, because a token's text may depend on the previous token.
        before, text = str(tokenizer.decode(ids[start:read])), str(tokenizer.decode(ids[start:end]))
        unfinished = text.endswith("\ufffd") and end < len(ids)
        if unfinished and end - read > MAX_INCOMPLETE:
            # No character is this long. Skip some of the invalid bytes to avoid quadratic time.
            split = end - MAX_INCOMPLETE // 2
            head = str(tokenizer.decode(ids[start:split]))
            if head + str(tokenizer.decode(ids[split:end])) == text:
                pieces.append(head[len(before) :])
                start = read = split
                continue
        pieces.append("" if unfinished else text[len(before) :])
        if not unfinished:
            start, read = read, end
    return pieces


def cut_at_stop(text: str, stop_strings: Sequence[str]) -> str:
    """Cut ``text`` before the first occurrence of any stop string."""
    places = [place for string in stop_strings if (place := text.find(string)) >= 0]
    return text[: min(places)] if places else text


def _decode_with_tags(ids: list[int], tokenizer: PreTrainedTokenizerBase, tags: dict[int, str]) -> str:
    parts = [(tag, list(part)) for tag, part in groupby(ids, tags.get)]
    return "".join(
        tag * len(part) if tag else str(tokenizer.decode(part, skip_special_tokens=True)) for tag, part in parts
    )
