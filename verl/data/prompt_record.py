"""The record of a prompt, in a module that imports little, because processes of environments and tools need it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class PromptRecord:
    """A tokenized prompt with the inputs for its verifier."""

    uid: int
    """Index in the dataset."""
    input_ids: list[int]
    data_source: str
    """Name of the verifier."""
    ground_truth: Any
    """The answer as a JSON value; null is allowed only with a custom reward function."""
    extra_info: Mapping[str, Any]
    messages: list[dict[str, Any]]
    """The chat in the file and the first observation of its environment; a plain text becomes one user message."""
    opens_thought: bool
    """Whether the prompt ends with ``<think>``."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Tool schemas from the data file to render in the prompt, overriding the run's."""
    state: str = ""
    """State in which the conversation begins, as JSON, if its environment showed an observation in the prompt."""

    def observing(self, state: str, messages: Sequence[Mapping[str, Any]]) -> "PromptRecord":
        """Return the record with the environment's first state, and its observation after the messages.

        An observation by the speaker of the message before it joins that message, as templates want turns to alternate.
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
        """Whether the prompt asks for the answer after ``####``, as in GSM8K's solutions, rather than in a box."""
        text = "\n".join(message["content"] or "" for message in self.messages)
        return "####" in text and "boxed" not in text
