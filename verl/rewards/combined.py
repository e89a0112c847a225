"""Weighted sums of custom reward functions, such as ``accuracy.py:score+0.2*style.py:short``."""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

REQUIRED = inspect.Parameter.empty

CORRECT_KEYS = ("correctness", "acc")
"""Keys that mark a response as correct, in order of precedence; the first is from the paper's release."""


class NoFunctionApplies(ValueError):
    """Raised if every function of a sum returns None, which means that it does not apply to the response."""


def weighted_sum(
    parts: Sequence[tuple[float, str, Callable[..., Any]]],
    shared: Sequence[str],
    read: Callable[[Any], tuple[float, bool, dict[str, Any]]],
) -> Callable[..., Any]:
    """Combine reward functions into one function that returns the weighted sum of their scores.

    A function that returns None does not apply and adds nothing, and the other weights are unchanged. The result has
    each function's score under the function's name, and the extra values of all functions. If any function returns a
    key in ``CORRECT_KEYS``, the first such function decides whether the response is correct. Otherwise, the response is
    correct if the first function that applies returns a score above 0. Coroutine functions run concurrently.

    Args:
        parts: Weight, import path and function of each summand.
        shared: Names of the arguments that are passed to every function. Any other argument is passed only to functions
            that have a parameter with the argument's name.
        read: Function that returns the score, correctness and extra values of a result.
    """
    names, functions = _names([path for _, path, _ in parts]), [function for _, _, function in parts]
    needs = [named_parameters(function) for function in functions]
    wanted = [{*parameters, *shared} for parameters in needs]

    def call(place: int, arguments: Mapping[str, Any]) -> Any:
        given = {name: value for name, value in arguments.items() if name in wanted[place]}
        return functions[place](**given)

    def joined(results: Sequence[Any]) -> dict[str, Any]:
        score, scores, extras = 0.0, dict[str, float](), dict[str, Any]()
        correct: tuple[bool, bool] | None = None  # whether a function says so by a key, and what it says
        for (weight, path, _), name, result in zip(parts, names, results, strict=True):
            if result is None:
                continue
            try:
                value, is_correct, more = read(result)
            except ValueError as error:
                raise type(error)(f"{path}: {error}") from None
            score, scores[name] = score + weight * value, value
            says_so = isinstance(result, Mapping) and any(result.get(key) is not None for key in CORRECT_KEYS)
            if correct is None or (says_so and not correct[0]):
                correct = (says_so, is_correct)
            extras = more | extras
        if correct is None:
            raise NoFunctionApplies(f"None from all of {', '.join(names)}; one of them must apply to every response")
        # Scores first, since few and short values are kept of a response.
        kept = scores | {key: value for key, value in extras.items() if key not in scores}
        return kept | {"score": score, "acc": correct[1]}

    def combined(**arguments: Any) -> dict[str, Any]:
        results = (call(place, arguments) for place in range(len(parts)))
        # A decorated coroutine function does not look like one.
        return joined([asyncio.run(result) if inspect.iscoroutine(result) else result for result in results])

    async def awaited(**arguments: Any) -> dict[str, Any]:
        async def one(place: int) -> Any:
            result = call(place, arguments)
            return await result if inspect.isawaitable(result) else result

        return joined(await asyncio.gather(*map(one, range(len(parts)))))

    function: Any = awaited if any(map(inspect.iscoroutinefunction, functions)) else combined
    further = dict.fromkeys(name for parameters in needs for name in parameters if name not in shared)
    needed = {name for parameters in needs for name, is_needed in parameters.items() if is_needed}
    kinds = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=REQUIRED if name in needed else None)
        for name in [*shared, *further]
    ]
    function.__signature__ = inspect.Signature(kinds)
    return function  # type: ignore[no-any-return]


def _names(paths: Sequence[str]) -> list[str]:
    """Return a name for each function: its own or, if that is a key of results or not the only one, with its module's.

    Names that are still equal are numbered.
    """
    own = [path.rpartition(":")[2] for path in paths]
    modules = [PurePath(path.rpartition(":")[0].removesuffix(".py")).name for path in paths]
    names = [
        f"{module}.{name}" if name in ("score", *CORRECT_KEYS) or own.count(name) > 1 else name
        for name, module in zip(own, modules, strict=True)
    ]
    return [f"{name}_{names[: i + 1].count(name)}" if names.count(name) > 1 else name for i, name in enumerate(names)]


def named_parameters(function: Callable[..., Any]) -> dict[str, bool]:
    """Map the name of each parameter that can be passed by keyword, in order, to whether the parameter is required."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default is REQUIRED for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
