"""Sampling responses with all engines of a run: who gets which request when, and what comes back."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from verl.batch import Batch
from verl.config.rollout import SamplingConfig
from verl.data.prompt_rows import PromptRecord
from verl.rollout.base import EngineReply
from verl.rollout.queue import RequestQueue
from verl.rollout.requests import ResponseRequests, ResponseSettings
from verl.single_controller.exchange import Exchange
from verl.single_controller.worker_group import WorkerGroup

STEPS_PER_CALL = 32
"""Engine steps between two replies of an engine."""


def generate_responses(
    workers: WorkerGroup,
    copies: int,
    records: Sequence[PromptRecord],
    n: int,
    sampling: SamplingConfig,
    seed: int,
    max_response_length: int,
    deterministic: bool = True,
    on_finished: Callable[[Batch], None] = lambda part: None,
    settings: ResponseSettings | None = None,
) -> Batch:
    """``n`` responses per prompt, neighbours where they share a prompt.

    Args:
        workers: of class :class:`verl.workers.hybrid.HybridWorker`.
        copies: neighbouring workers that form one engine.
        deterministic: see :func:`serve`.
        on_finished: called with responses soon after they have ended; their ``request`` says which they are.
        settings: in place of ``sampling``; None: that.

    Returns:
        Episodes with ``tokens``, ``rollout_logprobs``, ``truncated`` and ``rank_metrics``; R = ``max_response_length``.

    Raises:
        WorkerError: a worker raised or died.
    """
    rooms = workers.run("start_generation")[::copies]
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
