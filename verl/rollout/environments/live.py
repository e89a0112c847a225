"""Environments with TRL's interface: objects with ``reset(**row)``, ``get_reward()`` and public methods as tools.

Such an object stays in the process that created it. A conversation stores the dataset row, the seed, and all calls with
their results, so that another process can recreate the object and repeat the calls. ``random`` and numpy are seeded
before each call. Results that differ from the original ones are logged and counted.
"""

import hashlib
import json
import random
from typing import Any

import numpy as np

from verl.config.errors import ConfigError
from verl.config.rollout import MultiTurnConfig
from verl.data.prompt_record import PromptRecord, with_observation
from verl.rollout.environments.reward_functions import RewardFunctions, finite_reward, policy_message
from verl.rollout.environments.tools import Call, ToolEnvironment, Turn, awaited, methods_as_tools, unreadable_call
from verl.utils.user_code import user_code

MOST_LIVE = 64
"""Maximum number of objects that a process keeps between steps. The oldest are dropped first."""

Live = tuple[ToolEnvironment, Any]
"""Pair of an environment object's tools and the object itself."""


class LiveEnvironment:
    """Environment backed by objects of one class.

    Raises:
        ConfigError: If an object cannot be created, or a public method cannot be described to the model.
    """

    def __init__(self, made: type[Any], options: MultiTurnConfig, where: str) -> None:
        self.made, self.options, self.where = made, options, where
        self._live: dict[str, Live] = {}
        tools, _ = self._make()
        self.is_async = tools.is_async
        self._scores_itself = callable(getattr(made, "get_reward", None))
        self.functions = RewardFunctions(options.reward_functions)
        self.gives_reward = self._scores_itself or len(self.functions) > 0
        if options.reward == "only" and not self.gives_reward:
            fix = "define it, name rollout.multi_turn.reward_functions, or set add"
            raise ConfigError(f"{where}: has no get_reward() for rollout.multi_turn.reward=only; {fix}")

    async def start(self, record: PromptRecord) -> dict[str, Any]:
        """Return the initial state, with the text returned by ``reset`` and an empty list of calls."""
        row = {**record.extra_info, "prompt": record.messages}
        seed = record.extra_info.get("seed", record.uid)
        _, text = await self._reset(seed, row)
        return {"seed": seed, "row": row, "text": text, "calls": []} | ({"said": []} if len(self.functions) else {})

    def observe(self, state: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the text that ``reset`` returned as a message, or no message if it returned None."""
        return [] if state["text"] is None else [{"role": "user", "content": state["text"]}]

    async def step(
        self, state: dict[str, Any], turn: Turn
    ) -> tuple[dict[str, Any], list[dict[str, Any]], bool, float | None]:
        """Run a turn's tool calls in order. A turn without calls ends the conversation, which is then scored."""
        live, differing = self._live.pop(json.dumps(state), None), 0
        if live is None:
            live, differing = await self._repeated(state)
        calls, messages = list(state["calls"]), list[dict[str, Any]]()
        for call in turn.calls[: self.options.max_parallel_calls]:
            messages.append(await self._answer(live, state, call, len(calls)))
            calls.append([call.name, call.arguments, messages[-1]["content"]])
        if turn.malformed:
            messages.append(unreadable_call())
        state = {**state, "calls": calls}
        if len(self.functions):
            answers = [{key: message[key] for key in ("role", "name", "content")} for message in messages]
            state["said"] = [*state["said"], *([policy_message(turn)] if turn.tokens else []), *answers]
        done, reward = turn.ends or not messages, None
        if done:
            messages = [{"role": "tool", "content": ""}]
            reward = await self._reward(live[1], state)
        messages[0] |= {"differing": differing}
        if not done:
            self._live[json.dumps(state)] = live
        while len(self._live) > MOST_LIVE:
            self._live.pop(next(iter(self._live)))
        return state, messages, done, reward

    async def _reward(self, made: Any, state: dict[str, Any]) -> float | None:
        """Return what ``get_reward`` returns, plus the rewards of the reward functions if there are any."""
        reward, row = None, state["row"]
        seed_chance(state["seed"], "reward")
        if self._scores_itself:
            with user_code(f"{self.where}: get_reward()"):
                reward = await awaited(made.get_reward())
        if not len(self.functions):
            return reward
        prompt = with_observation(row["prompt"], self.observe(state))
        columns = {name: value for name, value in row.items() if name != "prompt"}
        where = f"{self.where}: get_reward()"
        return finite_reward(reward, where) + await self.functions.reward(made, prompt, state["said"], columns)

    def _make(self) -> Live:
        with user_code(f"{self.where}: making it"):
            made = self.made()
            return ToolEnvironment(methods_as_tools(made, self.where), self.options), made

    async def _reset(self, seed: Any, row: dict[str, Any]) -> tuple[Live, str | None]:
        live = self._make()
        if isinstance(self.options.environment, dict):  # Only reward functions get the column that chose, as in TRL.
            row = {name: value for name, value in row.items() if name != "environment"}
        seed_chance(seed, "reset")
        with user_code(f"{self.where}: reset(**row)"):
            text = await awaited(live[1].reset(**row))
        if not isinstance(text, str | None):
            raise ConfigError(f"{self.where}: reset(**row) returned {type(text).__name__}; expected text or None")
        return live, text

    async def _answer(self, live: Live, state: dict[str, Any], call: Call, number: int) -> dict[str, Any]:
        seed_chance(state["seed"], number)
        return await live[0].answer(call, None)

    async def _repeated(self, state: dict[str, Any]) -> tuple[Live, int]:
        """Recreate the object by repeating its calls, and count the results that differ from the original ones."""
        live, text = await self._reset(state["seed"], state["row"])
        differing = [("reset", state["text"], text)]
        for number, (name, arguments, before) in enumerate(state["calls"]):
            message = await self._answer(live, state, Call(name, arguments), number)
            differing.append((name, before, message["content"]))
        differing = [(name, before, now) for name, before, now in differing if before != now]
        for name, before, now in differing:
            print(f"{self.where}: {name} answered {now!r:.200} when repeated, not {before!r:.200}", flush=True)
        return live, len(differing)


def seed_chance(*parts: Any) -> None:
    """Seed ``random`` and ``numpy.random`` with a hash of ``parts``."""
    number = int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=4).digest())
    random.seed(number)
    np.random.seed(number)
