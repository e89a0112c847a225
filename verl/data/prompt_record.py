"""The record of a prompt. This module has few imports, because environment and tool processes import it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any


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
        """Return the record with the environment's initial state, and its first observation appended to the chat.

        If an observation has the same role as the last message, they are merged, as templates expect alternating turns.
        """
        chat = [dict(message) for message in self.messages]
        for message in messages:
            if chat and chat[-1]["role"] == message["role"]:
                chat[-1]["content"] = f"{chat[-1]['content']}\n\n{message['content']}"
            else:
                chat.append(dict(message))
        return replace(self, state=state, messages=chat)

    @property
    def asks_for_hashes(self) -> bool:
        """Whether the prompt asks for the answer after ``####``, as in GSM8K, rather than in a box."""
        text = "\n".join(message["content"] or "" for message in self.messages)
        return "####" in text and "boxed" not in text
