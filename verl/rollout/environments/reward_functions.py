"""Reward functions with TRL's parameter ``environments``, which are called where the objects of environments are.

A function receives lists with an entry per conversation, as in TRL, and here they always have one:
``function(environments=[object], prompts=[messages], completions=[messages], **columns)`` returns ``[reward]``, or
``[None]`` if it does not apply. It may be ``async``.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verl.config.errors import ConfigError
from verl.config.rewards import summands
from verl.rollout.environments.tools import Turn, awaited
from verl.utils.user_code import definition, load_code, user_code

FIELD = "rollout.multi_turn.reward_functions"

PASSED = ("environments", "prompts", "completions")
"""Arguments of all functions, in addition to the columns of the data."""


class RewardFunctions:
    """Weighted sum of reward functions.

    Raises:
        ConfigError: If a function cannot be loaded or has no parameter ``environments``.
    """

    def __init__(self, entries: Sequence[str]) -> None:
        parts = [part for entry in entries for part in summands(entry)]
        self._parts = [(weight, f"{FIELD}: {path}", load_code(path, FIELD)) for weight, path in parts]
        for _, where, function in self._parts:
            if "environments" not in _accepted(function, dict.fromkeys(PASSED)):
                fix = "add it, or list the function in reward_score.custom_functions"
                raise ConfigError(f"{where} has no parameter environments; {fix}{definition(function)}")

    def __len__(self) -> int:
        return len(self._parts)

    def check_columns(self, columns: Mapping[str, Any], place: str) -> None:
        """Raise ``ConfigError`` if a function needs a parameter for which the record at ``place`` has no column."""
        for _, where, function in self._parts:
            if missing := [name for name in _required(function) if name not in (*PASSED, *columns)]:
                known, needed = ", ".join(map(str, columns)) or "no column", ", ".join(missing)
                raise ConfigError(f"{place}: {where} needs {needed}, but the record has {known}{definition(function)}")

    async def reward(
        self, live: Any, prompt: Sequence[Any], completion: Sequence[Any], columns: Mapping[str, Any]
    ) -> float:
        """Return the weighted sum of the rewards of one conversation, given its object and its messages.

        Raises:
            ConfigError: If a function raises an exception, or does not return one reward.
        """
        ours = dict(zip(PASSED, ([live], [list(prompt)], [list(completion)]), strict=True))
        arguments, total = {name: [value] for name, value in columns.items()} | ours, 0.0
        for weight, where, function in self._parts:
            with user_code(where):
                returned = await awaited(function(**_accepted(function, arguments)))
            where += definition(function)
            try:
                (reward,) = returned
            except (TypeError, ValueError) as error:
                raise ConfigError(f"{where} returned {returned!r:.80}; expected a list of one reward") from error
            total += weight * finite_reward(reward, where)
        return total


def finite_reward(reward: Any, where: str) -> float:
    """Return a reward as a number, 0 for None; raise ``ConfigError`` if it is not a finite number."""
    try:
        value = 0.0 if reward is None else float(reward)
    except Exception:  # objects raise various exceptions
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(f"{where} returned the reward {reward!r:.80}; expected None or a finite number")
    return value


def policy_message(turn: Turn) -> dict[str, Any]:
    """Return a turn as a message of a completion; its text contains the calls as they were sampled."""
    calls = [{"type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in turn.calls]
    return {"role": "assistant", "content": turn.text} | ({"tool_calls": calls} if calls else {})


def _accepted(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``arguments`` that a function accepts, which are all of them if it has ``**kwargs``."""
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in arguments.items() if takes_all or name in parameters}


def _required(function: Callable[..., Any]) -> list[str]:
    """Return the names of the parameters without a default."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind in kinds and p.default is inspect.Parameter.empty]
