"""What fuzz tests share: hostile values and damaged files, and how many of them each tier tries."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from verl.config.errors import ConfigError

# A failing example is shown as it was found: making it smaller takes minutes.
QUIET: dict[str, Any] = {"deadline": None, "phases": [Phase.generate], "suppress_health_check": list(HealthCheck)}

LIMIT_S = 300
"""Seconds after which a test is stopped: some input is read for ever."""

ODD_TEXTS = [
    "",
    " ",
    "\ud800",
    "a\0b",
    "\u2028",
    "\x85",
    "x" * 10_000,
    '{"a": 1}',
    "[1]",
    "NaN",
    "A",
    "1+1?",
    "2",
    "-1",
]
NUMBERS = (0, 1, -1, 7, 29, 1.5, 1e308, float("inf"), float("nan"), 2**63, 10**400, True, False, None)
SCALARS = st.sampled_from([*ODD_TEXTS, *NUMBERS]) | st.text(max_size=5) | st.integers() | st.floats()
KEYS = st.sampled_from(["a", "role", "content", "ground_truth", "options", "tolerance", "", "step"]) | st.text(
    max_size=3
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=6
)
"""JSON values."""

PIECES = [b"", b"\0", b"\xff", b"\xff\xfe", b"\n", b"\r", b"[" * 5000, b"{" * 50, b"7" * 5000, b'"', b"\\ud800", b"NaN"]
PIECES += [
    b",",
    b": ",
    b"- ",
    b"!!python/name:os.system",
    b"!!timestamp x",
    b"&a [*a]",
    b"*a",
    b"\t",
    b"1e999",
    b"#",
    b"null",
]
DAMAGE = st.lists(
    st.tuples(
        st.sampled_from(["cut", "insert", "overwrite", "flip", "double", "drop"]),
        st.floats(0, 1),
        st.integers(1, 64),
        st.sampled_from(PIECES) | st.binary(max_size=4),
    ),
    min_size=1,
    max_size=4,
)
"""What happens to a file, for :func:`damaged`."""


def damaged(content: bytes, damage: Sequence[tuple[str, float, int, bytes]]) -> bytes:
    """``content`` after all of ``DAMAGE``."""
    for kind, place, size, piece in damage:
        at = int(place * len(content))
        head, part, tail = content[:at], content[at : at + size], content[at + size :]
        changed = {
            "cut": head,
            "insert": head + piece + part + tail,
            "overwrite": head + piece + content[at + len(piece) :],
            "flip": head + bytes(byte ^ 1 << size % 8 for byte in part[:1]) + part[1:] + tail,
            "double": head + part + part + tail,
            "drop": head + tail,
        }
        content = changed[kind]
    return content


def json_lines(rows: Sequence[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def error_of(read: Callable[[], Any], *named: Path | str) -> str:
    """The message of the ``ConfigError`` that ``read`` raises, one line that has all that is ``named``; empty for none.

    Every other exception is the test's.
    """
    try:
        read()
    except ConfigError as error:
        message = str(error)
        assert len(message.splitlines()) == 1, message
        message.encode()  # a terminal can write it
        assert all(str(name) in message for name in named), message
        return message
    return ""


def fuzz(
    few: int, **strategies: Any
) -> Callable[[Callable[..., None]], tuple[Callable[..., None], Callable[..., None]]]:
    """The test twice: with ``few`` examples, the same ones each time, and on the nightly tier with 300 of any kind."""

    def decorate(test: Callable[..., None]) -> tuple[Callable[..., None], Callable[..., None]]:
        quick = settings(max_examples=few, derandomize=True, **QUIET)(given(**strategies)(test))
        many = settings(max_examples=300, **QUIET)(given(**strategies)(test))
        limit = pytest.mark.timeout(LIMIT_S)
        return limit(quick), pytest.mark.nightly(limit(many))

    return decorate
