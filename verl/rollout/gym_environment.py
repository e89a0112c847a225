"""Environments with Gymnasium's interface, ``reset(seed=...)`` and ``step(action)``, as environments of conversations.

Such an environment keeps its state in itself and cannot travel. What travels is its seed and the actions so far; where
the live one is not at hand, a new one replays them, so it must depend on them alone.
"""

import json
from typing import Any

from verl.data.prompt_rows import PromptRecord
from verl.rollout.environments.tools import Turn

MOST_LIVE = 64
"""Environments that a process keeps between steps, the latest."""


class GymEnvironment:
    """A Gymnasium environment; derive from it, and name the class in ``rollout.multi_turn.environment``.

    The prompt must hold the first observation, of the seed ``extra_info["seed"]``, or the number of the prompt where
    there is none.
    """

    def __init__(self) -> None:
        self._live: dict[str, Any] = {}

    def make(self) -> Any:
        """Make a new environment, such as ``gymnasium.make("FrozenLake-v1", is_slippery=False)``."""
        raise NotImplementedError(f"{type(self).__name__}: define make(self), which returns an environment")

    def action(self, text: str) -> Any:
        """Read the action from a turn's text, as JSON values. The policy is shown the text of a ``ValueError``."""
        return text.strip()

    def show(self, observation: Any) -> str:
        """Return an observation as the policy reads it."""
        return str(observation)

    def start(self, record: PromptRecord) -> dict[str, Any]:
        """Seed and no actions."""
        return {"seed": record.extra_info.get("seed", record.uid), "actions": []}

    def step(self, state: dict[str, Any], turn: Turn) -> tuple[dict[str, Any], list[dict[str, Any]], bool, float]:
        """Take one step, after replaying earlier ones if necessary."""
        try:
            action = self.action(turn.text)
        except ValueError as error:
            return state, [{"role": "user", "content": str(error), "failed": True}], False, 0.0
        env = self._live.pop(json.dumps(state), None)
        if env is None:
            env = self.make()
            env.reset(seed=state["seed"])
            for earlier in state["actions"]:
                env.step(earlier)
        seen, reward, terminated, truncated, _ = env.step(action)
        state = {"seed": state["seed"], "actions": [*state["actions"], action]}
        done = bool(terminated or truncated)
        if done:
            env.close()
        else:
            self._live[json.dumps(state)] = env
        while len(self._live) > MOST_LIVE:
            self._live.pop(next(iter(self._live))).close()
        return state, [{"role": "user", "content": self.show(seen)}], done, float(reward)
