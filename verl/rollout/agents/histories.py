"""Message histories of agent sessions, and the record from which an unfinished session continues.

An agent's own state cannot be saved. A session that is carried over to the next call of the engines is therefore played
again from its first turn, and the recorded turns answer the agent's requests until a request differs.
"""

import json
from collections import Counter
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from verl.batch import POLICY
from verl.data.prompt_record import PromptRecord
from verl.rollout.agents.endpoint import Asked
from verl.rollout.agents.protocol import ChatRequest, Message, same_message
from verl.rollout.environments.conversations import Conversation
from verl.rollout.environments.pool import COUNTS
from vllm_patches.streams import substream

DIFFERENCES = COUNTS.index("replay_differences")

SHOWN_TOKENS = 12
"""Number of tokens to show of a request that differs from the recorded one."""

Branch = tuple[int, int] | None
"""Digest of an additional history's prompt, and its index among the session's histories with this prompt; None for the
first history."""


class SampledTurn(NamedTuple):
    """Record of a turn that the policy sampled, or began to sample."""

    begins: int
    """Number of the history's tokens before the turn."""
    ends: int
    max_tokens: int | None
    """Maximum number of tokens that was requested, or None."""
    stop: list[str]
    calls: Mapping[str, Any] | None
    """Tool calls and counts from the engine, or None if the turn is unfinished."""
    truncated: bool = False
    answered: int = -1
    """Index of the turn among all turns of the session, or -1 if the turn is unfinished."""


@dataclass
class Row(Conversation):
    """One message history of a session, with its tokens."""

    session: int = field(kw_only=True)
    branch: Branch = None
    """Determines the random stream of an additional history. The first history uses the stream of the response."""
    why: str = ""
    """Reason for starting this history (see docs/agents.md), or an empty string for the first history."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    history: list[Message] = field(default_factory=list)
    """Messages encoded in the tokens, including messages written by the policy. Empty if the last request was a text
    completion, because its tokens need not be messages."""
    asked: Asked | None = None
    """Request whose turn is being sampled, or None."""
    begins: int = 0
    """Number of the row's tokens before the turn that was requested last."""
    answered: int = -1
    """Index of this history's last turn among all turns of the session, or -1 before its first turn."""
    sampled: list[SampledTurn] = field(default_factory=list)
    """Turns of this history that were sent to the agent."""

    @property
    def is_read_again(self) -> bool:
        """Whether engines only read this history, which has turns and waits for no other."""
        return self.asked is None and bool(self.sampled)

    @property
    def room_in_turn(self) -> int | None:
        """Maximum number of further tokens in the requested turn, or None if the request has no maximum."""
        if self.asked is None:
            return 1
        limit = self.asked.request.max_tokens
        return None if limit is None else limit - (len(self.tokens) - self.begins)

    @property
    def turns_so_far(self) -> list[SampledTurn]:
        """Turns of this history, including an unfinished one."""
        if self.asked is None:
            return self.sampled
        limits = self.asked.request.max_tokens, self.asked.request.stop
        return [*self.sampled, SampledTurn(self.begins, len(self.tokens), *limits, None)]

    def stream(self, stream: int) -> int:
        """Return the random stream of this history, given the ``stream`` of its response."""
        return stream if self.branch is None else substream(substream(stream, self.branch[0]), self.branch[1])

    def saved(self) -> dict[str, Any]:
        """Return an additional history of a finished session as JSON values."""
        fields = ("why", "prompt_ids", "tokens", "source", "rollout_logprobs", "truncated")
        return {name: getattr(self, name) for name in fields}


@dataclass
class Session:
    """Session of one agent."""

    record: PromptRecord
    share: list[int]
    """Sessions of the same process that have not been started."""
    name: int
    """Number that identifies the session in replies, also after it was carried over."""
    rows: list[int] = field(default_factory=list)
    """Places of the session's message histories."""
    is_live: bool = False
    """Whether the agent has started and not yet ended."""
    has_ended: bool = False
    turns: int = 0
    last_turn: int = -1
    """Index of the last turn, including recorded ones."""
    was_refused: bool = False
    """Whether a request has been refused since the last turn."""
    reward: float = 0.0
    failure: str = ""
    """Reason for the agent's failure, or an empty string."""
    timed_out: bool = False
    thinks_since: float | None = None
    """Time at which the run began to wait for the agent, or None before the agent's start is reported."""
    begun: Counter[int] = field(default_factory=Counter)
    """Number of additional message histories, keyed by the digest of their prompt tokens."""
    recorded: dict[Branch, Row] = field(default_factory=dict)
    """Histories of a session that was carried over, until the agent's requests differ from them."""
    differences: int = 0
    """Number of times that the agent's requests differed from the recorded ones."""

    @property
    def never_asked(self) -> bool:
        """Whether the session has had no turn, neither now nor before it was carried over."""
        return not (self.turns or self.recorded or self.differences)

    def not_replayed(self, rows: Collection[Row]) -> dict[Branch, Row]:
        """Return the recorded histories that have more turns than the session's current ``rows``."""
        played = {row.branch: len(row.turns_so_far) for row in rows}
        return {branch: row for branch, row in self.recorded.items() if len(row.sampled) > played.get(branch, 0)}

    def carried_over(self, rows: Collection[Row]) -> Conversation:
        """Return an unfinished session with these ``rows`` as one conversation with the tokens of all histories."""
        kept = {row.branch: row for row in rows if row.turns_so_far} | self.not_replayed(rows)
        whole = Conversation(self.record.input_ids, version=[], record=self.record)
        whole.counts[DIFFERENCES] = self.differences
        saved = []
        for row in kept.values():
            whole.extend(row)
            size, turns = len(row.tokens), row.turns_so_far
            fields = {"branch": row.branch, "why": row.why, "prompt_ids": row.prompt_ids}
            saved.append(fields | {"size": size, "turns": turns})
        whole.state = json.dumps(saved) if saved else ""
        return whole

    def restore(self, whole: Conversation, number: int) -> None:
        """Restore the record of a session that :meth:`carried_over` returned. ``number`` is its current number."""
        self.differences, start = whole.counts[DIFFERENCES], 0
        for saved in json.loads(whole.state or "[]"):
            branch = None if saved["branch"] is None else tuple(saved["branch"])
            row = Row(saved["prompt_ids"], record=self.record, session=number, branch=branch, why=saved["why"])
            row.replace_tokens(whole.part(start, start := start + saved["size"]))
            row.sampled = [SampledTurn(*turn) for turn in saved["turns"]]
            self.recorded[branch] = row
            self.last_turn = max([self.last_turn, *(turn.answered for turn in row.sampled)])


def row_by_messages(rows: Mapping[int, Row], sampling: Container[int], request: ChatRequest) -> tuple[int | None, str]:
    """Return the place of the history that a request extends, or None and the reason for a new history.

    Args:
        rows: The session's histories by their places.
        sampling: Places of histories that are being sampled.
    """
    best, why, messages = -1, "", request.messages
    for place, row in reversed([*rows.items()]):
        if not row.history:
            continue
        pairs = zip(row.history, messages, strict=False)
        common = next((i for i, pair in enumerate(pairs) if not same_message(*pair)), None)
        common = min(len(row.history), len(messages)) if common is None else common
        further = messages[common:]
        if common == len(row.history):
            reason = "parallel" if place in sampling else "tools" if row.tools != request.tools else ""
            reason = reason or ("" if further else "repeated")
            if not reason and all(message["role"] != "assistant" for message in further):
                return place, ""
            reason = reason or "edited"
        elif not further:
            reason = "repeated"
        else:
            reason = "assistant" if row.history[common]["role"] == "assistant" else "edited"
        if common > best:
            best, why = common, reason if common else "other"
    return None, why or ("other" if rows else "")


def row_by_tokens(rows: Mapping[int, Row], sampling: Container[int], tokens: Sequence[int]) -> tuple[int | None, str]:
    """Like :func:`row_by_messages`, for the token ids of a prompt: return the longest row that they begin with."""
    best, longest, found, why = -1, 0, None, ""
    for place, row in rows.items():
        known, start = [*row.prompt_ids, *row.tokens], len(row.prompt_ids)
        pairs = enumerate(zip(known, tokens, strict=False))
        common = next((i for i, (ours, theirs) in pairs if ours != theirs), min(len(known), len(tokens)))
        if common == len(known) >= longest and place not in sampling:
            longest, found = common, place
        if common < best:
            continue
        if common == len(known):
            reason = "parallel"
        elif common == len(tokens):
            reason = "repeated"
        elif common < start:
            reason = "other"
        else:
            reason = "assistant" if row.source[common - start] == POLICY else "edited"
        best, why = common, reason
    return found, why


def difference(row: Row, recorded: Row, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return how the requested turn of ``row`` differs from the recorded one, or an empty string if it does not."""
    turn, requested = recorded.sampled[len(row.sampled)], row.turns_so_far[-1]
    before, now = recorded.prompt_ids + recorded.tokens[: turn.begins], row.prompt_ids + row.tokens
    if before != now:
        pairs = zip(before, now, strict=False)
        at = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), min(len(before), len(now)))
        shown = (str(tokenizer.decode(tokens[at : at + SHOWN_TOKENS])) for tokens in (now, before))
        return "a request has {!r} where it had {!r}".format(*shown)
    if (requested.max_tokens, requested.stop) != (turn.max_tokens, turn.stop):
        return "a request has another max_tokens or stop"
    return ""
