"""Counts of words of reflection in a response."""

import re
from collections.abc import Sequence
from functools import cache


def count_words(text: str, wanted: Sequence[str]) -> int:
    """Count the words and phrases in the text, in any case and only whole; where two overlap, the longer."""
    return len(_pattern(tuple(wanted)).findall(text)) if wanted else 0


@cache
def _pattern(wanted: tuple[str, ...]) -> re.Pattern[str]:
    longest_first = sorted(map(re.escape, wanted), key=len, reverse=True)
    return re.compile(rf"(?<!\w)(?:{'|'.join(longest_first)})(?!\w)", re.IGNORECASE)
