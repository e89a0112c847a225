"""A user's own reward function, named ``module:function`` or ``file.py:function`` in ``reward_score.custom_functions``.

It has veRL's signature ``(data_source, solution_str, ground_truth, extra_info=None)``, is called with these names and
those of ``reward_score.custom_kwargs``, and returns a number, a bool, or a dict with ``score``, optionally ``acc``, and
whatever else is to be logged and kept with the sample, veRL's ``reward_extra_info``. These extras are often made of the
response (``pred``), so they are as hostile as it is. What leaves a verifier process is a few plain values of a few
thousand characters, whatever the function returned.
"""

import inspect
import json
import math
import re
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache
from typing import Any

from verl.config.errors import ConfigError
from verl.utils.user_code import load_code, raised
from verl.verifiers.answers import after_thinking, extract_boxed
from verl.verifiers.verdict import Verdict

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
FIELD = "reward_score.custom_functions"

CUSTOM_KWARGS: dict[str, Any] = {}
"""Further keyword arguments of every function, ``reward_score.custom_kwargs``; filled by ``use_custom_functions``."""

CORRECT_KEYS = ("correctness", "acc")
"""Whether the response is right: veRL calls it ``acc``, the paper's release ``correctness``, which counts first."""

MAX_EXTRAS = 32
"""Keys kept of one response; further ones are left out."""

MAX_KEY_CHARS = 64
"""Longer keys are cut."""

MAX_CHARS = 4000
"""Characters kept of all values of one response together, as JSON. A text that exceeds them is cut, any other value is
replaced by the name of its type."""

MAX_CONTAINERS = 256
"""A value of more lists and mappings is replaced by the name of its type."""

MAX_LOGGED_KEYS = 32
"""Keys whose means are logged; of more, those that most responses have."""

_NOT_IN_KEYS = re.compile(r"[^\w.-]+", re.ASCII)


class CustomFunctionError(ConfigError):
    """A user's function raised an exception or did not return a score."""


@cache
def load_function(path: str, keywords: tuple[str, ...] = ()) -> Callable[..., Any]:
    """Load the function that ``module:function`` or ``file.py:function`` names.

    Raises ``ConfigError`` if the module cannot be imported or has no such function, or if the function does not take
    veRL's four arguments and ``keywords``.
    """
    function: Callable[..., Any] = load_code(path, FIELD)
    try:
        inspect.signature(function).bind(**dict.fromkeys([*ARGUMENTS, *keywords]))
    except TypeError as error:
        further = f" and reward_score.custom_kwargs, {', '.join(keywords)}" if keywords else ""
        raise ConfigError(f"{FIELD}={path!r}: {error}; it is called with {', '.join(ARGUMENTS)}{further}") from error
    return function


def custom_verdict(path: str, *arguments: Any) -> Verdict:
    """Return the verdict of the custom function ``path`` on ``ARGUMENTS``, with its score and further values.

    The function gets the whole response, thoughts included, and the ground truth as the data file holds it.

    Raises ``CustomFunctionError``, one line that names the function, the data source, the mistake and its place.
    ``MemoryError`` and ``RecursionError`` pass unchanged: the response causes them.
    """
    data_source, solution = arguments[:2]
    where = f"{FIELD}: {path} on data_source={data_source!r}"
    place = None
    try:
        function = load_function(path, tuple(CUSTOM_KWARGS))
        result = function(**dict(zip(ARGUMENTS, arguments, strict=True)), **CUSTOM_KWARGS)
        place = _place(function)
        score, correct, extras = _read_result(result)
    except (MemoryError, RecursionError):
        raise
    except CustomFunctionError as error:
        raise CustomFunctionError(f"{where} returned {error}{place}") from None
    except BaseException as error:  # the user's function and objects may raise anything, KeyboardInterrupt too
        kept = "" if place is None else f"returned a value that cannot be kept{place}: reading it "
        raise CustomFunctionError(f"{where} {kept}{raised(error)}") from error
    boxed = extract_boxed(after_thinking(solution)) is not None
    return Verdict(correct, boxed, "custom", score=score, extras=extras)


def _place(function: Callable[..., Any]) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f" ({code.co_filename}, line {code.co_firstlineno})" if code else ""


def _read_result(result: Any) -> tuple[float, bool, dict[str, Any]]:
    """Return the score, whether the response is correct, and further values.

    Raises ``CustomFunctionError`` with what was returned and what is expected.
    """
    whole = "a finite number, a bool, or a dict with 'score'"
    if not isinstance(result, Mapping):
        score = _number(result, "", whole)
        return score, score > 0, {}
    if "score" not in result:
        raise CustomFunctionError(f"a dict of {sorted(map(str, result))}; must be {whole}")
    score = _number(result["score"], "score=")
    flags = [(key, result[key]) for key in CORRECT_KEYS if result.get(key) is not None]
    correct = _number(flags[0][1], f"{flags[0][0]}=") > 0 if flags else score > 0
    return score, correct, plain_extras(result, ("score", *CORRECT_KEYS))


def _number(value: Any, what: str, expected: str = "a finite number or a bool") -> float:
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise CustomFunctionError(f"{what}{' '.join(repr(value).split()):.200}; must be {expected}")
    return number


def plain_extras(returned: Mapping[Any, Any], ignored: Collection[str]) -> dict[str, Any]:
    """Return the entries of ``returned`` except ``ignored``, as JSON values within the limits of this module.

    Characters of a key other than letters, digits, ``_``, ``.`` and ``-`` become ``_``. Of two keys that become equal,
    the first counts. Integers beyond 64 bits become floats, so that they fit a column of a table.
    """
    extras: dict[str, Any] = {}
    left = MAX_CHARS
    for key, value in returned.items():
        name = _NOT_IN_KEYS.sub("_", str(key)[:MAX_KEY_CHARS])
        if key in ignored or name in extras or len(extras) == MAX_EXTRAS:
            continue
        text = json.dumps(value, default=_plain, skipkeys=True)
        if len(text) > left or text.count("[") + text.count("{") > MAX_CONTAINERS:
            text = json.dumps(str.__str__(value)[:left] if isinstance(value, str) else _type_name(value)[:left])
        extras[name] = json.loads(text, parse_int=lambda digits: int(digits) if len(digits) < 19 else float(digits))
        left = max(0, left - len(text))
    return extras


def _plain(value: Any) -> Any:
    """Return the value of a scalar of numpy or torch; the type's name of anything else that JSON does not have."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else _type_name(value)


def _type_name(value: Any) -> str:
    return f"<{type(value).__name__}>"


def extra_metrics(extras: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Means of the numbers and bools among the extras of some responses.

    ``reward_extra/<key>/mean`` over the responses that have a finite one, ``reward_extra/<key>/count`` of these, and
    ``reward_extra/<key>/nonfinite`` of NaN and infinity, if there are any.
    """
    values: dict[str, list[float]] = {}
    for extra in extras:
        for key, value in extra.items():
            if isinstance(value, bool | int | float):
                values.setdefault(key, []).append(float(value))
    metrics: dict[str, float] = {}
    for key in sorted(values, key=lambda key: -len(values[key]))[:MAX_LOGGED_KEYS]:
        finite = [value for value in values[key] if math.isfinite(value)]
        if finite:
            # Exact: the sum of finite floats may exceed the largest.
            metrics[f"reward_extra/{key}/mean"] = statistics.mean(finite)
        metrics[f"reward_extra/{key}/count"] = float(len(finite))
        if len(finite) < len(values[key]):
            metrics[f"reward_extra/{key}/nonfinite"] = float(len(values[key]) - len(finite))
    return metrics
