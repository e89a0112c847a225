"""A user's own reward function, named ``module:function`` or ``file.py:function`` in ``reward_score.custom_functions``.

It has veRL's signature ``(data_source, solution_str, ground_truth, extra_info=None)``, is called with these names and
those of ``reward_score.custom_kwargs``, and returns a number, a bool, or a dict with ``score``, optionally
``correctness`` (or ``acc``), and whatever else is to be logged and kept with the sample.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from verl.config.errors import ConfigError
from verl.rewards.answers import after_thinking, extract_boxed
from verl.rewards.extras import plain_extras
from verl.rewards.score import Verdict
from verl.utils.user_code import load_code

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
FIELD = "reward_score.custom_functions"

CUSTOM_KWARGS: dict[str, Any] = {}
"""Further keyword arguments of every function, ``reward_score.custom_kwargs``; filled by ``use_custom_functions``."""

SCORE_KEYS = ("score", "correctness", "acc")
"""Keys of a function's result that are not extras."""


class CustomFunctionError(RuntimeError):
    """A user's function raised an exception or did not return a score."""


@cache
def load_function(path: str, keywords: tuple[str, ...] = ()) -> Callable[..., Any]:
    """The function that ``module:function`` or ``file.py:function`` names.

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


def custom_verdict(
    path: str, data_source: str, solution: str, ground_truth: Any, extra_info: Mapping[str, Any] | None
) -> Verdict:
    """The verdict of the user's function ``path``, with its score and what else it returned.

    The function gets the whole response, thoughts included, and the ground truth as the data file holds it.

    Raises ``CustomFunctionError`` naming the function, the data source and the mistake. ``MemoryError`` and
    ``RecursionError`` pass unchanged: the response causes them.
    """
    where = f"{FIELD}: {path} on data_source={data_source!r}"
    arguments = {"data_source": data_source, "solution_str": solution, "ground_truth": ground_truth}
    did = "raised"
    try:
        function = load_function(path, tuple(CUSTOM_KWARGS))
        result = function(**arguments, extra_info=extra_info, **CUSTOM_KWARGS)
        did = "returned a value that cannot be kept:"
        score, correct, extras = _read_result(result, where)
    except (CustomFunctionError, MemoryError, RecursionError):
        raise
    except BaseException as error:  # the user's function and objects may raise anything, KeyboardInterrupt too
        raise CustomFunctionError(f"{where} {did} {type(error).__name__}: {error}") from error
    boxed = extract_boxed(after_thinking(solution)) is not None
    return Verdict(correct, boxed, "custom", score=score, extras=extras)


def _read_result(result: Any, where: str) -> tuple[float, bool, dict[str, Any]]:
    """The score, whether the response is correct, and what else is kept."""
    if not isinstance(result, Mapping):
        score = _number(result, f"{where} returned")
        return score, score > 0, {}
    if "score" not in result:
        raise CustomFunctionError(f"{where} returned a dict without 'score'; it has {sorted(map(str, result))}")
    score = _number(result["score"], f"{where} returned score")
    flags = [(key, result[key]) for key in ("correctness", "acc") if result.get(key) is not None]
    correct = _number(flags[0][1], f"{where} returned {flags[0][0]}") > 0 if flags else score > 0
    return score, correct, plain_extras(result, SCORE_KEYS)


def _number(value: Any, what: str) -> float:
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise CustomFunctionError(f"{what}={value!r:.200}; it must be a finite number or a bool")
    return number
