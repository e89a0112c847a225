"""What a response's text shows: words of reflection."""

import re
from collections.abc import Sequence
from functools import cache


def count_words(text: str, wanted: Sequence[str]) -> int:
    """How often the words and phrases occur in the text, in any case and only whole; where two overlap, the longer."""
    return len(_pattern(tuple(wanted)).findall(text)) if wanted else 0


@cache
def _pattern(wanted: tuple[str, ...]) -> re.Pattern[str]:
    longest_first = sorted(map(re.escape, wanted), key=len, reverse=True)
    return re.compile(rf"(?<!\w)(?:{'|'.join(longest_first)})(?!\w)", re.IGNORECASE)
