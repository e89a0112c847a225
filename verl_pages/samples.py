"""Packs prompts and responses into a page's compressed chunks, shortening or omitting responses to fit."""

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_pages.html import CHUNK_BYTES, ascii_json, pack

MAX_PROMPT = 20_000
MAX_LISTED = 500
"""Maximum number of characters per prompt in the searchable list."""

USER_TURN = re.compile(
    r"(?:<\|(?:im_start|start_header_id|turn)\|?>|<start_of_turn>)user\b(?:<\|end_header_id\|>)?\s*"
    r"|<[|｜]user[|｜]>\s*|\[INST\]\s*",
    re.IGNORECASE,
)
"""Pattern of the chat template tokens that begin a user message."""

MAX_SHORT = 2_000
"""Maximum number of characters per answer or ground truth."""

ENTRY_BYTES = 600
"""Estimated size in bytes of a prompt's entry in the list, without its verdicts."""

Row = dict[str, Any]
"""Response as a mapping with the strings ``response``, ``reason``, ``answer`` and ``extra``, a one-character
``verdict`` ("c" for correct), ``truncated``, and metrics. The keys ``tokens``, ``token_logprobs``, ``token_entropies``,
``prefix_rows`` and ``prefixes`` are optional."""


@dataclass
class PromptSamples:
    """A prompt and the responses to it."""

    split: str
    uid: int
    prompt: str
    source: str
    ground_truth: str
    cells: dict[tuple[int, int], list[Row]] = field(default_factory=dict)
    """Maps (run, step) to the responses in order."""

    def texts(self) -> Iterator[str]:
        """Yield the texts of the prompt and of all responses."""
        yield self.prompt
        for rows in self.cells.values():
            yield from (row["response"] for row in rows)


@dataclass(frozen=True)
class Limits:
    """Limits on the responses shown on a page."""

    characters: int
    """Maximum number of characters per response. The middle of longer responses is omitted."""
    responses: int | None
    """Maximum number of responses per prompt and step, or None for no limit."""


@dataclass(frozen=True)
class PackedSamples:
    """Prompts and their responses, packed into compressed chunks that the page decompresses on demand."""

    chunks: list[str]
    """Compressed JSON. The first chunk lists the prompts, and all other chunks contain prompts with their responses."""
    count: int
    """Number of leading prompts that fit."""
    limits: Limits


def pack_samples(
    prompts: Sequence[PromptSamples],
    figures: Sequence[str],
    prefixes: Sequence[str],
    limits: Limits,
    first: int,
    room: float,
) -> PackedSamples:
    """Pack ``prompts`` in order until ``room`` bytes are used. Chunks are numbered from ``first``.

    ``figures`` are names of response metrics, and ``prefixes`` are names of rank metrics measured on prefixes.
    """
    listed: list[list[Any]] = []
    chunks: list[str] = []
    for held, text in _chunks(prompts, figures, prefixes, limits):
        chunk = pack(text)
        entries = [_entry(prompt, first + 1 + len(chunks), place) for place, prompt in enumerate(held)]
        room -= len(chunk) + 80 + sum(ENTRY_BYTES + sum(20 + len(cell[2]) for cell in entry[4]) for entry in entries)
        if room < 0:
            break
        listed += entries
        chunks.append(chunk)
    return PackedSamples([pack(ascii_json(listed)), *chunks], len(listed), limits)


def pack_all(
    prompts: Sequence[PromptSamples],
    figures: Sequence[str],
    limits: Sequence[Limits],
    first: int,
    room: int,
) -> PackedSamples:
    """Pack all ``prompts`` with the loosest of ``limits`` that makes them fit, or with the tightest if none does."""

    def fits(choice: Limits) -> bool:
        return pack_samples(prompts, figures, (), choice, first, room).count == len(prompts)

    choice = limits[bisect_left(limits[:-1], True, key=fits)]
    return pack_samples(prompts, figures, (), choice, first, float("inf"))


def _chunks(
    prompts: Sequence[PromptSamples], figures: Sequence[str], prefixes: Sequence[str], limits: Limits
) -> Iterator[tuple[list[PromptSamples], str]]:
    """Yield each chunk's prompts and its JSON."""
    held: list[PromptSamples] = []
    parts: list[str] = []
    size = 0
    for prompt in prompts:
        held.append(prompt)
        parts.append(ascii_json(_record(prompt, figures, prefixes, limits)))
        size += len(parts[-1])
        if size >= CHUNK_BYTES or prompt is prompts[-1]:
            yield held, f"[{','.join(parts)}]"
            held, parts, size = [], [], 0


def _entry(prompt: PromptSamples, chunk: int, place: int) -> list[Any]:
    """Return a prompt's entry in the list. ``entryOf`` in samples.js relies on the order of the fields."""
    cells = [
        [run, step, "".join(row["verdict"] for row in rows), sum(row["truncated"] for row in rows)]
        for (run, step), rows in sorted(prompt.cells.items())
    ]
    return [prompt.split, prompt.uid, prompt.source, listed(prompt.prompt), cells, chunk, place]


def listed(prompt: str) -> str:
    """Return the last user message of a prompt for the list, because system prompts are usually the same."""
    return USER_TURN.split(prompt)[-1][:MAX_LISTED]


def _record(prompt: PromptSamples, figures: Sequence[str], prefixes: Sequence[str], limits: Limits) -> dict[str, Any]:
    """Return a prompt and its responses as a JSON value. Omitted responses are None."""
    cells = []
    for _, rows in sorted(prompt.cells.items()):
        shown = _kept(rows, limits.responses)
        cells.append([_response(row, figures, prefixes, limits) if i in shown else None for i, row in enumerate(rows)])
    return {"prompt": prompt.prompt[:MAX_PROMPT], "truth": prompt.ground_truth[:MAX_SHORT], "cells": cells}


def _kept(rows: Sequence[Row], number: int | None) -> set[int]:
    """Return the indices of up to ``number`` responses to show, starting with one response per verdict."""
    first_of_verdict: dict[str, int] = {}
    for i, row in enumerate(rows):
        first_of_verdict.setdefault(row["verdict"], i)
    return set(list(dict.fromkeys([*first_of_verdict.values(), *range(len(rows))]))[:number])


def _response(row: Row, figures: Sequence[str], prefixes: Sequence[str], limits: Limits) -> dict[str, Any]:
    """Return a response as a JSON value. ``text`` contains its beginning and, if the middle is omitted, its end."""
    response = {
        "truncated": int(row["truncated"]),
        "reason": row["reason"][:100],
        "answer": row["answer"][:MAX_SHORT],
        "figures": [_rounded(row.get(name)) for name in figures],
    }
    if row["extra"]:
        response["extra"] = row["extra"][:MAX_SHORT]
    if row.get("tokens"):
        return response | _tokens(row, prefixes, limits.characters)
    text = row["response"]
    left_out = max(0, len(text) - limits.characters)
    # Omit the middle rather than the end, since responses usually end with the answer.
    head = limits.characters // 2 if left_out else len(text)
    return response | {"text": [text[:head], text[head + left_out :]], "left": left_out}


def _tokens(row: Row, prefixes: Sequence[str], characters: int) -> dict[str, Any]:
    """Return a response's text with token boundaries and per-token values."""
    tokens: list[str] = row["tokens"]
    head, tail = len(tokens), len(tokens)
    total = sum(map(len, tokens))
    if total > characters:
        head, tail = _within(tokens, characters // 2), len(tokens) - _within(tokens[::-1], characters // 2)
    shown = [*tokens[:head], *tokens[tail:]]
    of_tokens: dict[str, Any] = {
        # In UTF-16 code units, as in JavaScript.
        "lengths": [len(token.encode("utf-16-le", "surrogatepass")) // 2 for token in shown],
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
    """Return the number of leading tokens that fit within ``limit`` characters."""
    for number, token in enumerate(tokens):
        limit -= len(token)
        if limit < 0:
            return number
    return len(tokens)


def _rounded(value: Any) -> float | None:
    """Round a number to five significant digits, or return None for other types."""
    return float(f"{value:.5g}") if isinstance(value, int | float) else None
