"""Agent sessions, represented as conversations that the run's engines sample.

A session is an episode, and each of its requests is a turn. A request that extends one of the session's message
histories continues it: the sampled tokens are kept, and the tokens of the new messages are appended. Any other request
starts a new history, because the agent compacted its messages, dropped thoughts, or began another conversation. A
request for a text completion continues the history whose tokens its prompt begins with.

Legend: B sessions.
"""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from verl.batch import Batch
from verl.config.errors import ConfigError
from verl.data.prompt_record import PromptRecord
from verl.data.templates import render_chat
from verl.rollout.agents.completions import CompletionRequest
from verl.rollout.agents.endpoint import Asked, Ended, Event
from verl.rollout.agents.histories import DIFFERENCES, Row, Session, difference, row_by_messages, row_by_tokens
from verl.rollout.agents.pool import FIELD
from verl.rollout.agents.protocol import ChatRequest, Message, ProtocolError, expect, no_room
from verl.rollout.agents.replies import reply_to
from verl.rollout.environments.conversations import (
    CHARS_PER_TOKEN,
    CHECK_S,
    ConversationSetup,
    resumed,
    to_rows,
)
from verl.rollout.environments.pool import COUNTS, ENVIRONMENT_LOG
from verl.rollout.partial import from_batch, to_batch
from verl.rollout.queue import RequestQueue
from verl.rollout.requests import ResponseRequests
from verl.utils.background import drain

PATIENCE_S = 60.0
"""Seconds without an event after which sampling continues, because busy agents may be waiting for each other."""

FAILURES, TIMEOUTS = COUNTS.index("failures"), COUNTS.index("timeouts")


class Sessions:
    """Agent conversations in one call of the engines, with the interface of ``Conversations``.

    Places 0 to B - 1 are the sessions' first histories, and later places are additional histories.
    """

    num_first = 0
    """Number of requests that engines can receive at the start: 0, because agents have not requested turns yet."""

    def __init__(self, setup: ConversationSetup, records: Sequence[PromptRecord], partial: Batch | None = None) -> None:
        """Start the agents. ``partial`` holds the sessions so far, with ``stream``, if sessions are carried over."""
        self.setup, self._carries = setup, partial is not None
        shares = setup.pool.play(records)
        self._events = setup.pool.endpoint.events
        names = range(len(records)) if partial is None else [stream % (1 << 64) for stream in partial.stream.tolist()]
        self._sessions = [Session(record, [], name) for record, name in zip(records, names, strict=True)]
        for number, whole in enumerate([] if partial is None else resumed(records, partial)):
            self._sessions[number].restore(whole, number)
        self._rows: dict[int, Row] = {}
        self._sampling = set[int]()
        """Places of histories that are being sampled or waiting for an engine."""
        self._measured = set[int]()
        """Places of histories that the engines have read in this call, and whose hidden states they have."""
        self._next = len(records)
        self._over: list[int] = []
        """Sessions that have ended since the last call of :meth:`over`."""
        self._main: dict[int, int] = {}
        """Place of the history that represents each finished session."""
        for share in shares:
            left = list(share)
            for number in share:
                self._sessions[number].share = left
            for _ in range(min(setup.pool.at_once, len(share))):
                self._start(left)

    @property
    def waiting(self) -> set[int]:
        """Places that are not being sampled."""
        return set(range(self._next)) - self._sampling

    def requests(self, requests: ResponseRequests, places: Sequence[int]) -> ResponseRequests:
        """Return the requests for the turns at ``places``, given the requests for the B responses."""
        rows = [self._rows[place] for place in places]
        streams = [requests.streams[row.session] for row in rows]
        return replace(
            requests,
            rows=list(places),
            prompt_ids=[row.prompt_ids for row in rows],
            streams=[row.stream(stream) for stream, row in zip(streams, rows, strict=True)],
            overrides=None if requests.overrides is None else [requests.overrides[row.session] for row in rows],
            # A history that is only read is sent without its last token, from whose state nothing was sampled.
            partial=to_batch([row.part(0, -1) if row.is_read_again else row for row in rows]) if rows else None,
            max_tokens=[row.room_in_turn for row in rows],
            stop=[[] if row.asked is None else row.asked.request.stop for row in rows],
        )

    def update(self, part: Batch) -> list[int]:
        """Store the tokens that an engine has returned, and return the places of their histories."""
        places: list[int] = part.request.tolist()
        for place, response in zip(places, from_batch(part), strict=True):
            if not self._rows[place].is_read_again:
                self._rows[place].replace_tokens(response)
        return places

    def take(self, part: Batch) -> None:
        """Accept finished turns and send them to their agents."""
        for place, calls, truncated in zip(self.update(part), part.calls, part.truncated.tolist(), strict=True):
            row = self._rows[place]
            self._measured.add(place)
            self._sampling.discard(place)
            if not row.is_read_again:
                self._conclude(row, calls, truncated)
            self._finish(row.session)

    def rows(self, numbers: Sequence[int]) -> Batch:
        """Stop the agents of unfinished sessions, and return a batch with which a later call can continue these."""
        self.setup.pool.endpoint.stop(numbers, [row.asked.reply for row in self._rows.values() if row.asked])
        sessions = [self._sessions[number] for number in numbers]
        whole = [session.carried_over(self._histories(session).values()) for session in sessions]
        return to_rows(whole).fill(request=torch.tensor(numbers))

    def resume(self, queue: RequestQueue, deterministic: bool, wait: bool, check: Callable[[], None]) -> bool:
        """Accept the turns that agents have requested, and return whether to wait for further requests.

        Args:
            queue: Queue to which the places of new turns are added.
            deterministic: Whether to wait until every started agent has requested a turn or ended.
            wait: Whether to wait for at least one request if no agent waits for a turn.
            check: Called every second while waiting; it may raise.
        """
        before, in_time, replayed = set(self._sampling), True, True
        # Agents whose requests were recorded have their replies at once, so the round waits for them again.
        while in_time and replayed:
            waits = wait and (deterministic or self._sampling == before)
            asked, in_time = self._collect(deterministic, waits, check)
            # Sort by session, because places and the assignment to engines would otherwise depend on timing.
            replayed = any([self._reply(event) for event in sorted(asked, key=lambda event: event.session)])
            for number in range(len(self._sessions)):
                self._finish(number)
        queue.resume(sorted(self._sampling - before))
        return bool(self._thinking([])) and (in_time or not self._sampling)

    def over(self) -> Batch | None:
        """Return one episode for each session that has ended since the last call, or None if no session has ended.

        A session is represented by the history with its last turn; ``further_rows`` contains its other histories.

        Raises:
            ConfigError: If every agent has failed before requesting a turn.
        """
        numbers, self._over = self._over, []
        if not numbers:
            return None
        failures = [session.failure for session in self._sessions if session.failure and session.never_asked]
        if len(failures) == len(self._sessions):
            raise ConfigError(
                f"{FIELD}: every agent failed before it asked for a turn: {failures[0]}; {ENVIRONMENT_LOG} in the "
                "run's folder has what they printed"
            )
        main, further = [], []
        for number in numbers:
            session, place = self._sessions[number], self._main[number]
            row, others = self._rows[place], [self._rows[other] for other in session.rows if other != place]
            row.turns, row.reward = session.turns, session.reward
            for other in others:
                row.counts = [a + b for a, b in zip(row.counts, other.counts, strict=True)]
            row.counts[FAILURES] += int(bool(session.failure) and not session.timed_out)
            row.counts[TIMEOUTS] += int(session.timed_out)
            row.counts[DIFFERENCES] += session.differences
            main.append(row)
            further.append([other.saved() for other in others])
        truncated = torch.tensor([row.truncated for row in main])
        rows = to_rows(main).without("environment_states").fill(request=torch.tensor(numbers), truncated=truncated)
        return rows.fill(further_rows=further, opened_by=[row.why for row in main])

    def measured(self, metrics: Batch | None) -> Batch | None:
        """Return the rank metrics of the histories that represent sessions, with session numbers as ``request``."""
        if metrics is None:
            return None
        session_of = {place: number for number, place in self._main.items()}
        metrics = metrics[torch.tensor([place in session_of for place in metrics.request.tolist()])]
        return metrics.fill(request=torch.tensor([session_of[place] for place in metrics.request.tolist()]))

    # --- Agents ---

    def _collect(self, deterministic: bool, wait: bool, check: Callable[[], None]) -> tuple[list[Asked], bool]:
        """Return the requests of agents, and whether waiting for them ended in time (see :meth:`resume`)."""
        asked: list[Asked] = []
        last = time.monotonic()
        while True:
            for event in self._read_events(self._thinking(asked), wait):
                last = time.monotonic()
                if isinstance(event, Asked):
                    asked.append(event)
                elif isinstance(event, Ended):
                    self._end(event)
                elif self._sessions[event.session].thinks_since is None:
                    self._sessions[event.session].thinks_since = last
            if not (wait and self._thinking(asked) and (deterministic or not asked)):
                return asked, True
            if (asked or self._sampling) and time.monotonic() > last + PATIENCE_S:
                self.setup.note(
                    f"note: agents asked nothing for {PATIENCE_S:g} s while others wait for a turn, perhaps for each "
                    "other; sampling goes on without them, and the run is not reproducible"
                )
                return asked, False
            check()

    def _start(self, share: list[int]) -> None:
        if share:
            self._sessions[share.pop(0)].is_live = True

    def _thinking(self, asked: Sequence[Asked]) -> list[int]:
        """Return the sessions whose agents are running and not waiting for a turn."""
        asking = {event.session for event in asked} | {self._rows[place].session for place in self._sampling}
        return [n for n, session in enumerate(self._sessions) if session.is_live and n not in asking]

    def _read_events(self, thinking: Sequence[int], wait: bool) -> list[Event]:
        """Return new events and timeouts of ``thinking`` sessions. If ``wait`` is set, wait up to one second."""
        limit = self.setup.options.agent.timeout_s
        found = drain(self._events, min(CHECK_S, limit) if wait and thinking else 0.0)
        alive = {event.session for event in found}
        for number in thinking:
            since = self._sessions[number].thinks_since
            if number not in alive and since is not None and time.monotonic() >= since + limit:
                found.append(self._time_out(number))
        return found

    def _time_out(self, number: int) -> Ended:
        """Return the end of a session whose agent has exceeded its time limit."""
        limit = self.setup.options.agent.timeout_s
        self._sessions[number].timed_out = True
        self.setup.note(
            f"note: an agent asked nothing for {FIELD}.timeout_s={limit:g} s and was stopped; with such agents "
            "a run is not reproducible"
        )
        return Ended(number, 0.0, f"asked nothing for {limit:g} s")

    def _end(self, event: Ended) -> None:
        session = self._sessions[event.session]
        if not session.has_ended:
            session.is_live, session.has_ended = False, True
            session.reward, session.failure = event.reward, event.failure
            self.setup.pool.endpoint.close_session(event.session)
            if event.session in session.share:
                session.share.remove(event.session)
            else:
                self._start(session.share)

    def _histories(self, session: Session) -> dict[int, Row]:
        """Return the session's message histories by their places."""
        return {place: self._rows[place] for place in session.rows}

    def _finish(self, number: int) -> None:
        """Mark a session as finished if its agent has ended and none of its turns is being sampled."""
        session = self._sessions[number]
        if not session.has_ended or number in self._main or self._sampling.intersection(session.rows):
            return
        if session.not_replayed(self._histories(session).values()):
            self._differs(session, "a recorded request was not repeated")
        if not session.rows:
            # Such a session is excluded from training, but one token gives it a row in all later computations.
            self._open(number, number, self._row(number, session.record.input_ids))
            return
        main = max(session.rows, key=lambda place: self._rows[place].answered)
        if main not in self._measured:
            # All turns were recorded. An engine reads them for the sake of their hidden states.
            self._sampling.add(main)
            return
        self._main[number] = main
        self._over.append(number)

    # --- Replaying sessions that were carried over ---

    def _replay(self, place: int) -> bool:
        """Return whether a recorded turn answers a request. A turn that was interrupted is only restored."""
        row = self._rows[place]
        session = self._sessions[row.session]
        recorded = session.recorded.get(row.branch)
        if recorded is None or len(row.sampled) >= len(recorded.sampled):
            return False
        if what := difference(row, recorded, self.setup.tokenizer):
            self._differs(session, what)
            return False
        turn = recorded.sampled[len(row.sampled)]
        row.replace_tokens(recorded.part(0, turn.ends))
        row.why = recorded.why  # such as "parallel", although a recorded turn is never being sampled
        if turn.calls is None:
            return False
        self._sampling.remove(place)
        self._conclude(row, turn.calls, turn.truncated, turn.answered)
        return True

    def _differs(self, session: Session, what: str) -> None:
        """Count a session that differs from its record, which is no longer used."""
        session.recorded, session.differences = {}, session.differences + 1
        options = self.setup.options.agent
        self.setup.note_first(
            "replay",
            f"note: {options.path or options.command}: a session of prompt {session.record.uid} was played again and "
            f"differed: {what}; environment/replay_differences counts such sessions (docs/agents.md)",
        )

    # --- Turns ---

    def _reply(self, event: Asked) -> bool:
        """Accept a request or answer it by an error, and return whether it was answered by a recorded turn."""
        try:
            place = self._accept(event)
        except ProtocolError as error:
            self._refuse(event, error)
        except Exception as error:  # a request must not end the run, whatever a template or tokenizer makes of it
            self.setup.note(f"warning: a request of an agent was refused: {type(error).__name__}: {error}")
            self._refuse(event, ProtocolError(400, "invalid_request", f"{type(error).__name__}: {error}"))
        else:
            return self._replay(place)
        return False

    def _refuse(self, event: Asked, error: ProtocolError) -> None:
        """Answer a request by an error. An agent that only repeats such requests ends by its time limit."""
        event.reply.set_exception(error)
        session, now = self._sessions[event.session], time.monotonic()
        if session.has_ended or session.thinks_since is None or self._sampling.intersection(session.rows):
            return
        if not session.was_refused:
            session.was_refused, session.thinks_since = True, now
        elif now >= session.thinks_since + self.setup.options.agent.timeout_s:
            self._end(self._time_out(event.session))

    def _accept(self, event: Asked) -> int:
        """Add the turn that an agent requests to an existing or new history, and return the place of this history.

        Raises:
            ProtocolError: If the session has no turn, row or token left, or the template rejects the messages.
        """
        session, request, options = self._sessions[event.session], event.request, self.setup.options
        if session.has_ended:
            raise ProtocolError(404, "no_session", "the session has ended")
        most = options.max_assistant_turns
        if most is not None and session.turns + len(self._sampling.intersection(session.rows)) >= most:
            raise ProtocolError(400, "turn_limit", f"rollout.multi_turn.max_assistant_turns={most}")
        if request.ignored:
            self.setup.note(f"note: agents set {', '.join(request.ignored)}; the run's own options apply")
        if isinstance(request, CompletionRequest):
            place, history = self._continue_tokens(event, request), list[Message]()
        else:
            place, history = self._continue_messages(event, request), list(request.messages)
        row = self._rows[place]
        row.asked, row.history, row.begins = event, history, len(row.tokens)
        self._sampling.add(place)
        return place

    def _continue_messages(self, event: Asked, request: ChatRequest) -> int:
        """Return the place of the row that ends with a request's messages, which is a further row if necessary."""
        setup, session = self.setup, self._sessions[event.session]
        place, why = row_by_messages(self._histories(session), self._sampling, request)
        try:
            if place is None:
                self._check_rows(session)
                self._check_size(request.messages, setup.max_prompt_length)
                prompt = render_chat(request.messages, setup.tokenizer, setup.arguments(request.tools))
                return self._new_row(event.session, prompt, why, request.tools)
            row = self._rows[place]
            messages = request.messages[len(row.history) :]
            self._check_size(messages, setup.max_response_length)
            bridge = setup.bridges(row.tools).after(row.tokens[len(row.tokens) - row.open_tokens :], messages)
        except ConfigError as error:  # The template refuses the messages.
            raise ProtocolError(400, "invalid_request", str(error)) from error
        self._extend(row, bridge)
        return place

    def _continue_tokens(self, event: Asked, request: CompletionRequest) -> int:
        """Return the place of the row that ends with a request's tokens, which is a further row if necessary."""
        session, tokens = self._sessions[event.session], self._tokens(request)
        place, why = row_by_tokens(self._histories(session), self._sampling, tokens)
        if place is None:
            self._check_rows(session)
            return self._new_row(event.session, tokens, why, [])
        row = self._rows[place]
        self._extend(row, tokens[len(row.prompt_ids) + len(row.tokens) :])
        return place

    def _tokens(self, request: CompletionRequest) -> list[int]:
        """Return the token ids of a prompt. The tokenizer may add special tokens to a text, as to any text."""
        setup, prompt = self.setup, request.prompt
        most = setup.max_prompt_length + setup.max_response_length
        if isinstance(prompt, str) and len(prompt) <= most * CHARS_PER_TOKEN:
            prompt = list(setup.tokenizer(prompt.encode(errors="replace").decode()).input_ids)
        if isinstance(prompt, str) or len(prompt) > most:
            raise no_room(most, "the prompt has more")
        size = len(setup.tokenizer)
        expect(prompt and max(prompt) < size, "prompt", f"at least one token, with ids below {size}")
        return prompt

    def _check_rows(self, session: Session) -> None:
        """Raise ``ProtocolError`` if a session has no rows left."""
        setup = self.setup
        if len(session.rows) >= setup.options.agent.max_rows:
            limit = f"{FIELD}.max_rows={setup.options.agent.max_rows}"
            raise ProtocolError(400, "too_many_histories", f"{limit}: this request extends none of the session's rows")

    def _new_row(self, number: int, prompt: list[int], why: str, tools: list[dict[str, Any]]) -> int:
        session, most = self._sessions[number], self.setup.max_prompt_length
        if len(prompt) > most:
            raise no_room(most, f"the history begins with {len(prompt)} tokens")
        row = self._row(number, prompt, why=why, tools=tools)
        place = number
        if session.rows:
            place, self._next = self._next, self._next + 1
            digest = int.from_bytes(hashlib.blake2b(str(prompt).encode(), digest_size=8).digest(), "big")
            row.branch = (digest, session.begun[digest])
            session.begun[digest] += 1
        return self._open(number, place, row)

    def _row(self, number: int, prompt: list[int], **fields: Any) -> Row:
        """Return an empty history of a session. Sessions that are carried over have the versions of their tokens."""
        version: list[int] | None = [] if self._carries else None
        return Row(prompt, version=version, record=self._sessions[number].record, session=number, **fields)

    def _open(self, number: int, place: int, row: Row) -> int:
        self._rows[place] = row
        self._sessions[number].rows.append(place)
        self._sampling.add(place)
        return place

    def _extend(self, row: Row, tokens: Sequence[int]) -> None:
        """Append a request's new tokens to its history."""
        most = self.setup.max_response_length
        if len(row.tokens) + len(tokens) >= most:
            row.truncated = True
            raise no_room(most, f"data.max_response_length={most} leaves no token for a further turn")
        row.append_bridge(tokens)

    def _check_size(self, messages: Sequence[Message], max_tokens: int) -> None:
        """Raise ``ProtocolError`` if messages are far too long to be tokenized."""
        if sum(len(message["content"]) for message in messages) > max_tokens * CHARS_PER_TOKEN:
            raise no_room(max_tokens, "the messages have more")

    def _conclude(self, row: Row, calls: Mapping[str, Any], truncated: bool, answered: int | None = None) -> None:
        """Record a finished turn, and send it to its agent if one asked for it.

        ``answered`` is the turn's index in the session. Without it, the turn is the next one.
        """
        row.truncated = truncated and len(row.tokens) >= self.setup.max_response_length
        row.counts[-1] += calls["prefilled"]
        if row.asked is not None:
            session = self._sessions[row.session]
            row.answered = session.last_turn + 1 if answered is None else answered
            session.last_turn = max(session.last_turn, row.answered)
            turn = row.turns_so_far[-1]._replace(calls=calls, truncated=truncated)
            row.sampled.append(turn._replace(answered=row.answered))
            self._answer(row, row.asked, calls, truncated)

    def _answer(self, row: Row, asked: Asked, calls: Mapping[str, Any], truncated: bool) -> None:
        """Send the history's last turn to its agent."""
        setup, session = self.setup, self._sessions[row.session]
        row.asked, session.was_refused = None, False
        row.turns += 1
        session.turns += 1
        session.thinks_since = time.monotonic()
        asked.reply.set_result(reply_to(row, asked.request, f"{session.name}-{row.answered}", calls, truncated, setup))
