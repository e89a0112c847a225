"""The record of a prompt. This module has few imports, because environment and tool processes import it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

Begin = Callable[[list["PromptRecord"], Sequence[str]], list["PromptRecord"]]
"""Function that adds the first observations and the tools of environments to records, given their names in messages."""


@dataclass(frozen=True)
class PromptRecord:
    """A tokenized prompt with the inputs of its verifier."""

    uid: int
    """Index in the dataset."""
    input_ids: list[int]
    data_source: str
    """Name of the verifier."""
    ground_truth: Any
    """Answer as a JSON value. It may be null only with a custom reward function."""
    extra_info: Mapping[str, Any]
    messages: list[dict[str, Any]]
    """Chat from the data file, followed by the environment's first observation. Plain text becomes one user message."""
    opens_thought: bool
    """Whether the prompt ends with ``<think>``."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Tool schemas from the data file, which replace the run's tool schemas in the prompt."""
    state: str = ""
    """Initial state of the environment as JSON, if the prompt contains an observation."""

    def observing(self, state: str, messages: Sequence[Mapping[str, Any]]) -> "PromptRecord":
        """Return the record with the environment's initial state and its first observation appended to the chat."""
        return replace(self, state=state, messages=with_observation(self.messages, messages))

    @property
    def asks_for_hashes(self) -> bool:
        """Whether the prompt asks for the answer after ``####``, as in GSM8K, rather than in a box."""
        text = "\n".join(message["content"] or "" for message in self.messages)
        return "####" in text and "boxed" not in text


def with_observation(chat: Sequence[Mapping[str, Any]], messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a chat with an environment's first messages.

    A message with the role of the last one is appended to it, because templates expect alternating turns.
    """
    joined = [dict(message) for message in chat]
    for message in messages:
        if joined and joined[-1]["role"] == message["role"]:
            joined[-1]["content"] = f"{joined[-1]['content']}\n\n{message['content']}"
        else:
            joined.append(dict(message))
    return joined
