"""Custom reward functions, listed as ``module:function`` or ``file.py:function`` in ``reward_score.custom_functions``.

A function has veRL's signature ``(data_source, solution_str, ground_truth, extra_info=None)`` and is called with these
keyword arguments and ``reward_score.custom_kwargs``. Additional parameters receive the entries of ``extra_info``, or
the data columns, with the same names. A function returns a number, a bool, or a dict with ``score``, optionally
``acc``, and extra values to log and store with the sample (veRL's ``reward_extra_info``). Extra values often contain
parts of the response and are untrusted, so a verifier process returns at most a few thousand characters of plain JSON.
"""

import asyncio
import inspect
import json
import math
import re
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

from verl.config.errors import ConfigError
from verl.config.rewards import is_sum, summands
from verl.rewards.combined import CORRECT_KEYS, INAPPLICABLE, add_verdicts, summand_names
from verl.utils.user_code import load_code, raised
from verl.verifiers.answers import after_thinking, extract_boxed
from verl.verifiers.verdict import Verdict

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
TRL_ARGUMENTS = ("completions", "prompts", "completion_ids")
FIELD = "reward_score.custom_functions"

CUSTOM_KWARGS: dict[str, Any] = {}
"""Keyword arguments for all functions (``reward_score.custom_kwargs``), set by ``use_custom_functions``. An entry whose
key is a function's path contains that function's arguments instead."""

MAX_EXTRAS = 32
"""Maximum number of extra values per response; additional values are dropped."""

MAX_KEY_CHARS = 64
"""Maximum length in characters of an extra value's key; longer keys are truncated."""

MAX_CHARS = 4000
"""Maximum total length in characters of a response's extra values as JSON. Strings beyond the limit are truncated, and
other values are replaced by their type names."""

MAX_CONTAINERS = 256
"""Maximum number of lists and mappings in an extra value; larger values are replaced by their type names."""

MAX_LOGGED_KEYS = 32
"""Maximum number of keys whose statistics are logged; the most frequent keys are chosen."""

_NOT_IN_KEYS = re.compile(r"[^\w.-]+", re.ASCII)


class CustomFunctionError(ConfigError):
    """Error for a custom function that raises an exception or does not return a valid score."""


class MissingColumns(ConfigError):
    """Error for a custom function with a required parameter for which there is no column."""


def keywords_of(path: str, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keyword arguments for the function ``path``; ``kwargs`` has the format of ``CUSTOM_KWARGS``."""
    own: Mapping[str, Any] | None = kwargs.get(path)
    return {name: value for name, value in kwargs.items() if ":" not in name} if own is None else own


def check_function(path: str, kwargs: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` if any function in ``path`` cannot be loaded or does not accept its arguments."""
    for _, part in summands(path):
        load_function(part, tuple(keywords_of(part, kwargs)))


@cache
def load_function(path: str, keywords: tuple[str, ...] = ()) -> Callable[..., Any]:
    """Load a function from its path, ``module:function`` or ``file.py:function``.

    Raises ``ConfigError`` if it cannot be imported or does not accept veRL's four arguments and ``keywords``.
    """
    function: Callable[..., Any] = load_code(path, FIELD)
    try:
        inspect.signature(function).bind_partial(**dict.fromkeys([*ARGUMENTS, *keywords]))
    except TypeError as error:
        further = f" and reward_score.custom_kwargs, {', '.join(keywords)}" if keywords else ""
        raise ConfigError(f"{FIELD}={path!r}: {error}; it is called with {', '.join(ARGUMENTS)}{further}") from error
    return function


@cache
def further_parameters(path: str) -> tuple[str, ...]:
    """Return the parameter names of all functions in ``path``, except ``ARGUMENTS``, in order."""
    named = dict.fromkeys(name for _, part in summands(path) for name in _parameters(part))
    return tuple(name for name in named if name not in ARGUMENTS)


@cache
def _parameters(path: str) -> dict[str, bool]:
    """Return the names of parameters that accept keyword arguments, in order, and whether each is required."""
    parameters = inspect.signature(load_function(path)).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {p.name: p.default is inspect.Parameter.empty for p in parameters if p.kind in kinds}


def custom_verdict(path: str, *arguments: Any, is_part: bool = False) -> Verdict:
    """Return the verdict of the custom function or weighted sum ``path``, called with ``ARGUMENTS``.

    The function receives the whole response, including thoughts, and the ground truth from the data file. Coroutines
    are run to completion. If ``is_part`` is set, the function may return None, which gives ``INAPPLICABLE``.

    If the function fails, raises a one-line ``CustomFunctionError`` with the function, data source, error and its
    location. ``MemoryError`` and ``RecursionError`` propagate unchanged, because the response causes them.
    """
    if is_sum(path):
        parts = summands(path)
        total = add_verdicts(parts, [custom_verdict(part, *arguments, is_part=True) for _, part in parts])
        if total.reason == INAPPLICABLE.reason:
            raise none_applies(arguments[0], parts)
        return replace(total, extras=plain_extras(total.extras, ()))
    with _named(path, arguments):
        result = _called(path, arguments)
        # A decorated coroutine function does not look like one.
        result = asyncio.run(result) if inspect.iscoroutine(result) else result
    return verdict_of(path, arguments, result, is_part)


async def awaited_verdict(path: str, *arguments: Any, is_part: bool = False) -> Verdict:
    """Return the verdict of a custom function that is a coroutine; see :func:`custom_verdict`."""
    with _named(path, arguments):
        result = await _called(path, arguments)
    return verdict_of(path, arguments, result, is_part)


def none_applies(data_source: str, parts: Sequence[tuple[float, str]]) -> CustomFunctionError:
    """Return the error to raise if no function of a sum applies to a response."""
    none = f"None from all of {', '.join(summand_names(parts))}; one of them must apply to every response"
    return CustomFunctionError(f"{FIELD} of data_source={data_source!r} returned {none}")


def is_async(path: str) -> bool:
    """Return whether any custom function in ``path`` is a coroutine function."""
    return any(inspect.iscoroutinefunction(load_function(part)) for _, part in summands(path))


def _called(path: str, arguments: Sequence[Any]) -> Any:
    info, keywords, parameters = arguments[3] or {}, keywords_of(path, CUSTOM_KWARGS), _parameters(path)
    further = {name: info[name] for name in further_parameters(path) if name in info} | {**keywords}
    if missing := [name for name in further_parameters(path) if parameters[name] and name not in further]:
        trl = " (as in TRL; here a function scores one response, solution_str)" if {*missing} & {*TRL_ARGUMENTS} else ""
        if "environments" in missing:
            trl = " (as in TRL; name such a function in rollout.multi_turn.reward_functions)"
        raise MissingColumns(
            f"takes {', '.join(missing)}{trl}, but besides {', '.join(ARGUMENTS)} the record has "
            f"{', '.join(map(str, info)) or 'no column'}{_location(load_function(path))}"
        )
    return load_function(path, tuple(keywords))(**dict(zip(ARGUMENTS, arguments, strict=True)), **further)


@contextmanager
def _named(path: str, arguments: Sequence[Any], what: str = "") -> Iterator[None]:
    """Convert errors inside the block to a ``CustomFunctionError`` that names the function and the data source."""
    where = f"{FIELD}: {path} on data_source={arguments[0]!r}"
    try:
        yield
    except (MemoryError, RecursionError, asyncio.CancelledError):
        raise
    except MissingColumns as error:
        raise CustomFunctionError(f"{where} {error}") from None
    except CustomFunctionError as error:
        raise CustomFunctionError(f"{where} returned {error}{_location(load_function(path))}") from None
    except BaseException as error:  # custom code may raise anything, including KeyboardInterrupt
        raise CustomFunctionError(f"{where} {what}{raised(error)}") from error


def verdict_of(path: str, arguments: Sequence[Any], result: Any, is_part: bool) -> Verdict:
    """Convert the ``result`` of the function ``path`` to a verdict; see :func:`custom_verdict`."""
    if result is None and is_part:
        return INAPPLICABLE
    kept = f"returned a value that cannot be kept{_location(load_function(path))}: reading it "
    with _named(path, arguments, kept):
        score, correct, extras = _read_result(result)
        stated = isinstance(result, Mapping) and any(result.get(key) is not None for key in CORRECT_KEYS)
    boxed = extract_boxed(after_thinking(arguments[1])) is not None
    return Verdict(correct, boxed, "custom", score=score, extras=extras, stated=stated)


def _location(function: Callable[..., Any]) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f" ({code.co_filename}, line {code.co_firstlineno})" if code else ""


def _read_result(result: Any) -> tuple[float, bool, dict[str, Any]]:
    """Parse ``result`` into score, correctness and extra values. Raises ``CustomFunctionError`` if it is invalid."""
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
    """Return the entries of ``returned``, except for ``ignored``, as JSON values within the limits of this module.

    In keys, characters other than letters, digits, ``_``, ``.`` and ``-`` become ``_``. If keys collide, the first one
    is kept. Integers that do not fit in 64 bits become floats, so that they can be stored in a table column.
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
    """Return the value of a numpy or torch scalar, or the type name of any other non-JSON object."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else _type_name(value)


def _type_name(value: Any) -> str:
    return f"<{type(value).__name__}>"


PARTIAL = {
    "custom": "custom reward functions lie between 0 and 1, and all count as right; return a dict with score and acc "
    "to say which responses are (docs/rewards.md)",
    "environment": "environments lie between 0 and 1, and all count as right, as those above 0 do",
}
"""Second part of the note about partial scores, keyed by verdict reason."""


def partial_scores_note(verdicts: Sequence[Verdict]) -> str:
    """Return a note if most scores are between 0 and 1 and all responses with such scores count as correct.

    This happens if a function returns a partial score without ``acc``, such as 0.01 for any response, or if an
    environment returns a partial reward. Otherwise, the returned note is empty.
    """
    for reason, end in PARTIAL.items():
        alike = [verdict for verdict in verdicts if verdict.reason == reason]
        parts = [verdict for verdict in alike if verdict.score is not None and 0 < verdict.score < 1]
        if len(parts) > len(alike) / 2 and all(verdict.correct for verdict in parts):
            return f"note: {len(parts)} of {len(alike)} scores of {end}"
    return ""


def extra_metrics(extras: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return statistics of the numbers and bools that custom functions returned.

    ``reward_extra/<key>/{mean,count}`` are the mean and count of finite values. ``reward_extra/<key>/nonfinite`` is the
    count of NaN and infinite values, if there are any.
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
            # Use statistics.mean, which is exact, because a float sum could overflow.
            metrics[f"reward_extra/{key}/mean"] = statistics.mean(finite)
        metrics[f"reward_extra/{key}/count"] = float(len(finite))
        if len(finite) < len(values[key]):
            metrics[f"reward_extra/{key}/nonfinite"] = float(len(values[key]) - len(finite))
    return metrics
