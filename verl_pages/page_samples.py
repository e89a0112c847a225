"""The samples on the page of a run: prompts in compressed chunks, within a budget."""

import zlib
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

from verl.run.samples import METRIC_PREFIX
from verl_pages.html import CHUNK_BYTES, ascii_json, pack
from verl_pages.sample_rows import FIGURES, GatheredSamples, PromptSamples, Row, utf16_length

MAX_TEXT = 12_000
"""Characters of a response that are shown; longer ones lose their middle."""

MAX_PROMPT = 20_000
MAX_SHORT = 2_000
"""Characters of an answer or a ground truth."""

MAX_RESPONSES = 16
"""Responses of one prompt and step."""

MAX_PROMPTS = 20_000


def pack_samples(found: GatheredSamples, first: int, room: int) -> tuple[dict[str, Any], list[str]]:
    """The page's index of samples, and their chunks, numbered from ``first``, in at most ``room`` bytes.

    The first chunk lists the prompts; the next ones hold their responses.
    """
    figures = [*FIGURES, *(METRIC_PREFIX + name for name in found.metrics)]
    ordered = _by_use(found.prompts)
    listed: list[list[Any]] = []
    chunks: list[str] = []
    for prompts, text in _chunks(ordered[:MAX_PROMPTS], figures, found.prefixes):
        packed = pack(text)
        room -= len(packed) + 80 + sum(400 + 30 * len(prompt.cells) for prompt in prompts)
        if room < 0:
            break
        number = first + 1 + len(chunks)
        listed += [_entry(prompt, number, place) for place, prompt in enumerate(prompts)]
        chunks.append(packed)
    index = {
        "prompts": len(listed),
        "list": first,
        "figures": [name.removeprefix(METRIC_PREFIX) for name in figures],
        "prefixes": found.prefixes,
        "limits": _limits(found, len(listed)),
    }
    return index, [pack(ascii_json(listed)), *chunks]


def _limits(found: GatheredSamples, shown: int) -> str:
    """What the reader must know of what is left out."""
    parts = []
    if shown < len(found.prompts) or found.fraction < 1:
        share = found.fraction * shown / max(1, len(found.prompts))
        parts.append(f"To keep the page small, it has {shown:,} prompts, about {share:.0%}, the same at every step.")
    if found.num_read < found.num_files:
        parts.append(f"{found.num_read:,} of {found.num_files:,} files were read, spread over the steps.")
    if shown:
        parts.append(
            f"Of responses longer than {MAX_TEXT:,} characters the beginning and the end are shown, and of a step at "
            f"most {MAX_RESPONSES} responses to a prompt; samples/ has all of them in full."
        )
    return " ".join(parts)


def _by_use(prompts: Sequence[PromptSamples]) -> list[PromptSamples]:
    """Those first that were answered at most steps, of validation and training in turn."""

    def use(prompt: PromptSamples) -> tuple[int, int]:
        return -len(prompt.cells), zlib.crc32(f"{prompt.split} {prompt.uid}".encode())

    splits = [sorted((p for p in prompts if p.split == split), key=use) for split in ("val", "train")]
    return [prompt for pair in zip_longest(*splits) for prompt in pair if prompt is not None]


def _chunks(
    prompts: Sequence[PromptSamples], figures: Sequence[str], prefixes: Sequence[str]
) -> Iterator[tuple[list[PromptSamples], str]]:
    """Prompts and the JSON of each chunk."""
    held: list[PromptSamples] = []
    parts: list[str] = []
    size = 0
    for prompt in prompts:
        held.append(prompt)
        parts.append(ascii_json(_record(prompt, figures, prefixes)))
        size += len(parts[-1])
        if size >= CHUNK_BYTES:
            yield held, f"[{','.join(parts)}]"
            held, parts, size = [], [], 0
    if held:
        yield held, f"[{','.join(parts)}]"


def _entry(prompt: PromptSamples, chunk: int, place: int) -> list[Any]:
    """A prompt in the list: ``entryOf`` in samples.js reads the fields in this order."""
    cells = [
        [run, step, sum(row["correct"] for row in rows), len(rows), sum(row["truncated"] for row in rows)]
        for (run, step), rows in sorted(prompt.cells.items())
    ]
    return [prompt.split, prompt.uid, prompt.source, prompt.prompt[:300], cells, chunk, place]


def _record(prompt: PromptSamples, figures: Sequence[str], prefixes: Sequence[str]) -> dict[str, Any]:
    cells = [
        [run, step, [_response(row, figures, prefixes) for row in rows[:MAX_RESPONSES]]]
        for (run, step), rows in sorted(prompt.cells.items())
    ]
    return {"prompt": prompt.prompt[:MAX_PROMPT], "truth": prompt.ground_truth[:MAX_SHORT], "cells": cells}


def _response(row: Row, figures: Sequence[str], prefixes: Sequence[str]) -> dict[str, Any]:
    """One response; ``text`` is its beginning and its end, which is empty unless the middle is left out."""
    found = {
        "sample": row["sample"],
        "correct": int(row["correct"]),
        "truncated": int(row["truncated"]),
        "reason": row["reason"][:100],
        "answer": row["answer"][:MAX_SHORT],
        "figures": [_rounded(row.get(name)) for name in figures],
    }
    if row["reward_extra_info"]:
        found["extra"] = row["reward_extra_info"][:MAX_SHORT]
    if row["tokens"]:
        return found | _tokens(row, prefixes)
    text = row["response"]
    left_out = max(0, len(text) - MAX_TEXT)
    head = MAX_TEXT // 2 if left_out else len(text)
    return found | {"text": [text[:head], text[head + left_out :]], "left": left_out}


def _tokens(row: Row, prefixes: Sequence[str]) -> dict[str, Any]:
    """The text of a response as its tokens make it, and what is known of each of them."""
    tokens: list[str] = row["tokens"]
    head, tail = len(tokens), len(tokens)
    total = sum(map(len, tokens))
    if total > MAX_TEXT:
        head, tail = _within(tokens, MAX_TEXT // 2), len(tokens) - _within(tokens[::-1], MAX_TEXT // 2)
    shown = [*tokens[:head], *tokens[tail:]]
    of_tokens: dict[str, Any] = {
        "lengths": [utf16_length(token) for token in shown],
        "head": head,
        "skipped": tail - head,
        "rows": row["prefix_rows"],
        "prefixes": [[_rounded(v) for v in row["prefixes"].get(name, [])] for name in prefixes],
    }
    for short, name in (("logprobs", "token_logprobs"), ("entropies", "token_entropies")):
        if name in row:
            of_tokens[short] = [_rounded(v) for v in (*row[name][:head], *row[name][tail:])]
    left_out = total - sum(map(len, shown))
    return {"text": ["".join(tokens[:head]), "".join(tokens[tail:])], "left": left_out, "tokens": of_tokens}


def _within(tokens: Sequence[str], limit: int) -> int:
    """How many of the first tokens have at most ``limit`` characters."""
    for number, token in enumerate(tokens):
        limit -= len(token)
        if limit < 0:
            return number
    return len(tokens)


def _rounded(value: Any) -> float | None:
    """To five digits."""
    return float(f"{value:.5g}") if isinstance(value, int | float) else None
