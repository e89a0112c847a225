"""Adapter for environments with Gymnasium's interface, ``reset(seed=...)`` and ``step(action)``.

Such an environment keeps its state internally and cannot be sent between processes. Only the seed and past actions are
sent, so they must determine the state. A process that lacks the environment creates a new one and replays the actions.
"""

import json
from typing import Any

from verl.data.prompt_record import PromptRecord
from verl.rollout.environments.live import seed_chance
from verl.rollout.environments.pool import name_of
from verl.rollout.environments.tools import Turn
from verl.utils.user_code import user_code

MOST_LIVE = 64
"""Maximum number of live environments that a process keeps between steps. The oldest are dropped first."""


class GymEnvironment:
    """Base class for adapters of Gymnasium environments. ``rollout.multi_turn.environment`` must name a subclass.

    The environment is seeded with ``extra_info["seed"]``, or the prompt's ``uid`` by default, and the first observation
    is added to the prompt. ``random`` and ``numpy.random``, which some environments use, are seeded before each call.
    """

    def __init__(self) -> None:
        self._live: dict[str, Any] = {}

    def make(self) -> Any:
        """Create a new environment, such as ``gymnasium.make("FrozenLake-v1", is_slippery=False)``."""
        raise NotImplementedError(f"{type(self).__name__}: define make(self), which returns an environment")

    def action(self, text: str) -> Any:
        """Convert a turn's text to a JSON-serializable action. The policy sees the message of any ``ValueError``."""
        return text.strip()

    def show(self, observation: Any) -> str:
        """Return the text of an observation as shown to the policy."""
        return str(observation)

    def start(self, record: PromptRecord) -> dict[str, Any]:
        """Return the initial state, with the seed and an empty list of actions."""
        return {"seed": record.extra_info.get("seed", record.uid), "actions": []}

    def observe(self, state: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the first observation as a message. Subclasses whose prompts contain it set ``observe = None``."""
        env, seen = self._begun(state)
        _close(env)
        return [{"role": "user", "content": self.show(seen)}]

    def step(self, state: dict[str, Any], turn: Turn) -> tuple[dict[str, Any], list[dict[str, Any]], bool, float]:
        """Take one step, first replaying earlier steps if necessary."""
        try:
            action = self.action(turn.text)
        except ValueError as error:
            return state, [{"role": "user", "content": str(error), "failed": True}], False, 0.0
        # The same value as in a repetition: lists for arrays and tuples.
        action = json.loads(json.dumps(action, default=_as_list))
        env = self._live.pop(json.dumps(state), None)
        if env is None:
            env, _ = self._begun(state)
            for number, earlier in enumerate(state["actions"]):
                self._taken(env, state, number, earlier)
        seen, reward, terminated, truncated, _ = self._taken(env, state, len(state["actions"]), action)
        state = {"seed": state["seed"], "actions": [*state["actions"], action]}
        done = bool(terminated or truncated)
        if done:
            _close(env)
        else:
            self._live[json.dumps(state)] = env
        while len(self._live) > MOST_LIVE:
            _close(self._live.pop(next(iter(self._live))))
        return state, [{"role": "user", "content": self.show(seen)}], done, float(reward)

    def _begun(self, state: dict[str, Any]) -> tuple[Any, Any]:
        """Return a new environment and its first observation."""
        env = self.make()
        seed_chance(state["seed"], "reset")
        seen, _ = env.reset(seed=state["seed"])
        return env, seen

    def _taken(self, env: Any, state: dict[str, Any], number: int, action: Any) -> Any:
        seed_chance(state["seed"], number)
        with user_code(f"{name_of(self)}: its environment's step({action!r:.80}), where action(text) returned that,"):
            return env.step(action)


def _as_list(value: Any) -> Any:
    """Convert NumPy scalars and arrays to JSON values."""
    if not hasattr(value, "tolist"):
        raise TypeError(f"action(text) returned {type(value).__name__}; an action must be a JSON value")
    return value.tolist()


def _close(env: Any) -> None:
    """Close an environment if it has a ``close`` method, which many custom environments lack."""
    getattr(env, "close", lambda: None)()
