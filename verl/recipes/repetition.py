"""Whether a response repeats itself."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise


def repeats(tokens: Sequence[int]) -> bool:
    """Whether a response repeats itself, by the rule of LASER-DE's code (github.com/hkust-nlp/Laser).

    Some n-gram stands at least m times, two of them less than a third of the response apart; or, from 4n tokens on,
    some 2n-gram stands twice. n is 2 below 30 tokens, 3 below 100, else 4; m is 2 below 200 tokens, else 3. With n
    above 2, an n-gram of one token over and over does not count. Up to 8 tokens do not repeat themselves.
    """
    length = len(tokens)
    if length <= 8:
        return False
    n, times = (2 if length < 30 else 3 if length < 100 else 4), (2 if length < 200 else 3)
    starts: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for i in range(length - n + 1):
        starts[tuple(tokens[i : i + n])].append(i)
    frequent = [at for gram, at in starts.items() if len(at) >= times and (n == 2 or len(set(gram)) > 1)]
    near = any(after - before < length // 3 for at in frequent for before, after in pairwise(at))
    double = [tuple(tokens[i : i + 2 * n]) for i in range(length - 2 * n + 1)]
    return near or (length >= 4 * n and len(set(double)) < len(double))
