"""Sampling responses with all engines of a run: who gets which request when, and what comes back."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from verl.batch import Batch
from verl.config.rollout import SamplingConfig
from verl.data.prompt_rows import PromptRecord
from verl.rollout.base import EngineReply
from verl.rollout.queue import RequestQueue
from verl.rollout.requests import ResponseRequests, ResponseSettings
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
        ranks = range(engine * self.copies, (engine + 1) * self.copies)
        self._calls[engine] = [self.workers.call(rank, self.method, arguments) for rank in ranks]

    def receive(self, from_all: bool) -> list[tuple[int, Any]]:
        """The engines that have replied, in their order, with their replies: one at least, or all that are busy.

        Raises:
            WorkerError: a worker raised or died.
        """
        ranks = {
            call: engine * self.copies + copy
            for engine, calls in self._calls.items()
            for copy, call in enumerate(calls)
            if call not in self._results
        }
        for call, result in self.workers.completed(ranks, self.method, self._started):
            self._results[call] = result
            if not from_all and self._has_replied(ranks[call] // self.copies):
                break
        return [(engine, self._reply(engine)) for engine in sorted(self._calls) if self._has_replied(engine)]

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
) -> Batch:
    """``sampling.n`` responses per prompt, neighbours where they share a prompt.

    Args:
        workers: of class :class:`verl.workers.hybrid.HybridWorker`.
        copies: neighbouring workers that form one engine.
        deterministic: see :func:`serve`.
        on_finished: called with responses soon after they have ended; their ``request`` says which they are.
        settings: in place of ``sampling``; None: that.

    Returns:
        Episodes with ``tokens``, ``rollout_logprobs``, ``truncated`` and rank metrics; R = ``max_response_length``.

    Raises:
        WorkerError: a worker raised or died.
    """
    rooms, n = workers.run("start_generation")[::copies], sampling.n
    settings = settings or ResponseSettings()
    parts: list[Batch] = []

    def message(rows: Sequence[int]) -> tuple[ResponseRequests, int]:
        asked = [records[row // n] for row in rows]
        requests = ResponseRequests(
            rows=list(rows),
            prompt_ids=[record.input_ids for record in asked],
            uids=[record.uid for record in asked],
            places=[row % n for row in rows],
            sampling=sampling,
            seed=seed,
            overrides=None if settings.overrides is None else [settings.overrides[row] for row in rows],
            temperatures=settings.temperatures,
        )
        return requests, STEPS_PER_CALL

    def take(reply: EngineReply) -> tuple[int, int]:
        if reply.finished is not None:
            parts.append(reply.finished)
            on_finished(reply.finished)
        return reply.num_ended, reply.num_waiting

    queue = RequestQueue(len(records) * n, rooms)
    serve(queue, Exchange(workers, "advance", copies), message, take, deterministic)
    joined = Batch.join(parts)
    assert joined.request.sort().values.equal(torch.arange(queue.num_requests)), "each response is sampled once"
    return joined[joined.request.argsort()].without("request").widened(max_response_length)


def serve(
    queue: RequestQueue,
    engines: Exchange,
    message: Callable[[Sequence[int]], tuple[Any, ...]],
    take: Callable[[Any], tuple[int, int]],
    deterministic: bool,
) -> None:
    """Give engines requests from the queue as they have room, until all are finished.

    Args:
        message: what an engine is sent along with further requests, which may be none.
        take: receives a reply; returns how many requests it has finished, and how many the engine has not begun.
        deterministic: while requests are left, deal only when all engines have replied. Who gets which request then
            depends on the lengths of responses, counted in steps, and not on how long engines take. Otherwise each
            engine gets more as soon as it replies.
    """
    for engine, requests in enumerate(queue.first()):
        # Even none: engines may have to begin together.
        engines.send(engine, *message(requests))
    while engines.busy:
        replies = engines.receive(from_all=deterministic and queue.left > 0)
        for engine, reply in replies:
            queue.finish(engine, *take(reply))
        for engine, _ in replies:
            requests = queue.take(engine)
            if queue.held[engine]:
                engines.send(engine, *message(requests))
