"""Sampling responses with all engines of a run: who gets which request when, and what comes back."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from verl.batch import Batch
from verl.cluster.failures import MachineError
from verl.config.rollout import SamplingConfig
from verl.data.prompt_rows import PromptRecord
from verl.rollout.base import EngineReply
from verl.rollout.environments.conversations import DRIVER_COLUMNS, Conversations, ConversationSetup, with_measured
from verl.rollout.queue import RequestQueue
from verl.rollout.requests import ResponseRequests, ResponseSettings, response_stream
from verl.single_controller.worker_group import WorkerGroup

STEPS_PER_CALL = 32
"""Engine steps between two replies of an engine."""


class Exchange:
    """Messages to the engines of a worker group and their replies; an engine has at most one message at a time.

    A message is a call of ``method`` on the workers of an engine.

    Args:
        copies: neighbouring workers that form one engine. All get the same message; the first one's reply counts.
    """

    def __init__(self, workers: WorkerGroup, method: str, copies: int) -> None:
        self.workers, self.method, self.copies = workers, method, copies
        self._ranks = workers.living.copy()
        self._calls: dict[int, list[Any]] = {}
        self._results: dict[Any, Any] = {}
        self._started = time.monotonic()

    @property
    def busy(self) -> bool:
        """Whether a reply is to come."""
        return bool(self._calls)

    def send(self, engine: int, *arguments: Any) -> None:
        """Give ``engine``, which must be idle, a message."""
        assert engine not in self._calls, f"engine {engine} is busy"
        ranks = self._ranks[engine * self.copies : (engine + 1) * self.copies]
        self._calls[engine] = [self.workers.call(rank, self.method, arguments) for rank in ranks]

    def receive(self, from_all: bool) -> list[tuple[int, Any]]:
        """The engines that have replied, in their order, with their replies: one at least, or all that are busy. None
        in place of a reply says that the engine was lost.

        Raises:
            WorkerError: a worker raised; or it was lost, and the others cannot go on.
        """
        engines = {call: engine for engine, calls in self._calls.items() for call in calls}
        ranks = {
            call: self._ranks[engine * self.copies + copy]
            for engine, calls in self._calls.items()
            for copy, call in enumerate(calls)
            if call not in self._results
        }
        lost: list[tuple[int, Any]] = []
        try:
            for call, result in self.workers.completed(ranks, self.method, self._started):
                self._results[call] = result
                if not from_all and self._has_replied(engines[call]):
                    break
        except MachineError as error:
            engine = self._ranks.index(self.workers.leave_out(error)) // self.copies
            # It may have had nothing to do.
            self._calls.pop(engine, None)
            lost.append((engine, None))
        replied = [engine for engine in sorted(self._calls) if self._has_replied(engine)]
        return lost + [(engine, self._reply(engine)) for engine in replied]

    def _has_replied(self, engine: int) -> bool:
        return all(call in self._results for call in self._calls[engine])

    def _reply(self, engine: int) -> Any:
        return [self.workers.received(self._results.pop(call)) for call in self._calls.pop(engine)][0]


def generate_responses(
    workers: WorkerGroup,
    copies: int,
    records: Sequence[PromptRecord],
    sampling: SamplingConfig,
    seed: int,
    max_response_length: int,
    deterministic: bool = True,
    on_finished: Callable[[Batch], None] = lambda part: None,
    settings: ResponseSettings | None = None,
    conversations: ConversationSetup | None = None,
) -> Batch:
    """``sampling.n`` responses per prompt, neighbours where they share a prompt.

    Args:
        workers: of class :class:`verl.workers.hybrid.HybridWorker`.
        copies: neighbouring workers that form one engine.
        deterministic: see :func:`serve`.
        on_finished: called with responses soon after they have ended; their ``request`` says which they are.
        settings: in place of ``sampling``; None: that.
        conversations: how responses have several turns; None: each has one.

    Returns:
        Episodes with ``tokens``, ``rollout_logprobs``, ``truncated`` and rank metrics; R = ``max_response_length``.

    Raises:
        WorkerError: a worker raised or died.
    """
    settings, n = settings or ResponseSettings(), sampling.n
    asked = [record for record in records for _ in range(n)]
    requests = ResponseRequests(
        rows=range(len(asked)),
        prompt_ids=[record.input_ids for record in asked],
        streams=[response_stream(seed, record.uid, i % n) for i, record in enumerate(asked)],
        sampling=sampling,
        overrides=settings.overrides,
        temperatures=settings.temperatures,
    )
    parts: list[Batch] = []

    def finished(part: Batch) -> None:
        parts.append(part)
        on_finished(part)

    talks = None if conversations is None else conversations.begin(asked, None)
    _, measured = run_engines(workers, copies, requests, deterministic, finished, conversations=talks)
    joined = Batch.join(parts)
    assert joined.request.sort().values.equal(torch.arange(len(asked))), "each response is sampled once"
    joined = with_measured(joined[joined.request.argsort()], measured)
    return joined.without("request").widened(max_response_length)


def run_engines(
    workers: WorkerGroup,
    copies: int,
    requests: ResponseRequests,
    deterministic: bool,
    on_finished: Callable[[Batch], None],
    enough: Callable[[Sequence[int]], bool] | None = None,
    conversations: Conversations | None = None,
    steps_per_call: int | None = None,
) -> tuple[list[Batch], Batch | None]:
    """Have all engines work on ``requests``, of which row i is named i.

    Args:
        on_finished: gets responses soon after they have ended.
        enough: asked whenever engines have replied, with the responses that have ended so far; once it says so, the
            others are cut. None: all are finished.
        conversations: those that the requests are; None: a response has one turn.
        steps_per_call: engine steps between two replies of an engine; None: ``STEPS_PER_CALL``.

    Returns:
        The responses that were cut, and those that no engine has begun, as ``requests`` has them, by ``request``; and
        the rank metrics of conversations, by ``request``, None where engines return them with their responses.
    """
    rooms = workers.run_living("start_generation")[::copies]
    queue = RequestQueue(len(requests.rows), rooms)
    ended: list[int] = []
    nothing = requests.of(())
    left = set(range(len(requests.rows)))
    """The responses that no engine has returned."""

    def message(places: Sequence[int]) -> tuple[ResponseRequests, int]:
        asked = requests.of(places) if places else nothing
        if conversations is not None and places:
            asked = replace(asked, partial=conversations.partial(places).without(*DRIVER_COLUMNS))
        return asked, steps_per_call or STEPS_PER_CALL

    def end(responses: Batch) -> None:
        places = responses.request.tolist()
        ended.extend(places)
        left.difference_update(places)
        on_finished(responses)

    def end_conversations() -> None:
        assert conversations is not None
        over = conversations.over()
        if over is not None:
            end(over)

    def take(reply: EngineReply) -> tuple[int, int]:
        if reply.finished is None:
            return 0, reply.num_waiting
        if conversations is None:
            end(reply.finished)
        else:
            conversations.take(reply.finished)
            end_conversations()
        return len(reply.finished), reply.num_waiting

    def lose(engine: int) -> list[int]:
        elsewhere = set[int]() if conversations is None else conversations.waiting
        return [place for place in dict.fromkeys(queue.dealt[engine]) if place in left - elsewhere]

    continued = None
    if conversations is not None:
        continued = partial(conversations.resume, queue, end_conversations, deterministic)
    stop = None if enough is None else lambda: enough(ended)
    serve(queue, Exchange(workers, "advance", copies), message, take, deterministic, stop, lose, continued)
    measured = None if conversations is None else _measured(workers, copies)
    if enough is None:
        return [], measured
    return _cut(workers, copies, requests, left, conversations), measured


def _cut(
    workers: WorkerGroup,
    copies: int,
    requests: ResponseRequests,
    left: set[int],
    conversations: Conversations | None,
) -> list[Batch]:
    """Return the responses that engines were working on, as they give them back, and those that none has begun.

    Args:
        left: the places that no engine has returned. Those of an engine that is lost here are returned as they were.
    """
    parts: list[Batch] = []
    for unfinished in workers.run_living("cut")[::copies]:
        if unfinished is not None:
            places = unfinished.request.tolist()
            if conversations is not None:
                unfinished.merge(conversations.partial(places).columns(*DRIVER_COLUMNS))
            parts.append(unfinished)
            left.difference_update(places)
    if left and requests.partial is not None:
        rows = sorted(left)
        unclaimed = requests.partial[rows] if conversations is None else conversations.partial(rows)
        parts.append(unclaimed.fill(request=torch.tensor(rows)))
    return parts


def _measured(workers: WorkerGroup, copies: int) -> Batch | None:
    """The rank metrics of conversations, of all engines; None if they measure none."""
    parts = [part for part in workers.run_living("measured")[::copies] if part is not None]
    return Batch.join(parts) if parts else None


def serve(
    queue: RequestQueue,
    engines: Exchange,
    message: Callable[[Sequence[int]], tuple[Any, ...]],
    take: Callable[[Any], tuple[int, int]],
    deterministic: bool,
    enough: Callable[[], bool] | None = None,
    lose: Callable[[int], Sequence[int]] = lambda engine: [],
    answered: Callable[[bool], bool] | None = None,
) -> None:
    """Give engines requests from the queue as they have room, until all are finished.

    Args:
        message: what an engine is sent along with further requests, which may be none.
        take: receives a reply; returns how many requests it has finished, and how many the engine has not begun.
        deterministic: while requests are left, deal only when all engines have replied. Who gets which request then
            depends on the lengths of responses, counted in steps, and not on how long engines take. Otherwise each
            engine gets more as soon as it replies.
        enough: asked after replies; once it says so, engines get no further message. With ``deterministic`` it is asked
            when all have replied.
        lose: called when an engine was lost; returns those of its requests that others are given.
        answered: of conversations; called after replies, to put back into the queue what goes on, waiting for it if the
            argument is true. Returns whether there are more to wait for.
    """
    idle: set[int] = set()
    for engine, requests in enumerate(queue.first()):
        # Even none: engines may have to begin together.
        engines.send(engine, *message(requests))
    more = stopped = False
    while engines.busy or more:
        from_all = deterministic and (queue.left > 0 or enough is not None or answered is not None)
        replies = engines.receive(from_all) if engines.busy else []
        for engine, reply in replies:
            if reply is None:
                queue.lose(engine, lose(engine))
                continue
            queue.finish(engine, *take(reply))
            idle.add(engine)
        works = engines.busy or (not stopped and (any(queue.held) or queue.left > 0))
        more = answered is not None and answered(deterministic or not works)
        stopped = enough is not None and enough()
        if stopped:
            continue
        for engine in sorted(idle):
            requests = queue.take(engine)
            if queue.held[engine]:
                idle.remove(engine)
                engines.send(engine, *message(requests))
