"""Options, records, single steps of an environment, and the pages' examples, for tests of conversations."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.kit import ROOT, shipped_config, user_code
from verl.config.rollout import MultiTurnConfig
from verl.data.prompt_record import PromptRecord
from verl.rollout.environments.pool import Answer, EnvironmentStep, first_observation, take_step
from verl.rollout.environments.tools import Call, Turn

RECORD = PromptRecord(3, [5], "environment", None, {"target": 4}, [{"role": "user", "content": "Play."}], False)


def multi_turn(**changes: Any) -> MultiTurnConfig:
    """Return the shipped options of conversations, in one small process, with changes."""
    shipped = shipped_config().rollout.multi_turn
    return replace(shipped, **{"enable": True, "num_workers": 1, "timeout_s": 2.0, "memory_limit_mb": 512} | changes)


def turn(*calls: tuple[str, Any], text: str = "", **fields: Any) -> Turn:
    """Return a turn of the policy with tool calls, each a name with arguments."""
    return Turn(**{"text": text, "tokens": [1], "calls": [Call(*call) for call in calls], "malformed": False} | fields)


def step_of(*calls: tuple[str, Any], state: str = "", record: PromptRecord = RECORD, **fields: Any) -> EnvironmentStep:
    """Return the step of an environment after such a turn."""
    return EnvironmentStep(record, state, turn(*calls, **fields))


def take(environment: Any, *calls: tuple[str, Any], **fields: Any) -> Answer:
    """Take such a step, and return the environment's answer."""
    return asyncio.run(take_step(environment, step_of(*calls, **fields)))


def start(environment: Any, record: PromptRecord = RECORD) -> tuple[str, list[str]]:
    """Return an environment's first state, and its first messages."""
    state, messages = asyncio.run(first_observation(environment, record))
    return state, [message["content"] for message in messages]


def contents(answer: Answer) -> list[str]:
    """Return the texts of an answer's messages."""
    return [message["content"] for message in answer.messages]


def documented(name: str, folder: Path) -> str:
    """Write the example of docs/conversations.md that holds ``name`` to a file; returns its path."""
    text = (ROOT / "docs" / "conversations.md").read_text()
    (block,) = [part.partition("```")[0] for part in text.split("```python\n")[1:] if name in part.partition("```")[0]]
    return user_code(folder, block, "example.py")
