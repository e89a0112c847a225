"""Sampling responses with all engines of a run: who gets which request when, and what comes back."""

from collections.abc import Callable, Sequence
from typing import Any

from verl.config.rollout import SamplingConfig
from verl.protocol import PromptBatch, RolloutBatch
from verl.rollout.base import FinishedResponses, collect
from verl.rollout.queue import RequestQueue
from verl.rollout.requests import ResponseRequests, ResponseSettings
from verl.single_controller.exchange import Exchange, Messages
from verl.single_controller.worker_group import WorkerGroup

STEPS_PER_CALL = 32
"""Engine steps between two replies of an engine."""


def generate_responses(
    workers: WorkerGroup,
    copies: int,
    prompts: PromptBatch,
    sampling: SamplingConfig,
    seed: int,
    max_response_length: int,
    pad_token_id: int,
    deterministic: bool = True,
    on_finished: Callable[[FinishedResponses], None] = lambda part: None,
    settings: ResponseSettings | None = None,
) -> RolloutBatch:
    """``sampling.n`` responses per prompt, neighbours where they share a prompt.

    Args:
        workers: of class :class:`verl.workers.hybrid.HybridWorker`.
        copies: neighbouring workers that form one engine.
        deterministic: see :func:`serve`.
        settings: of each response, in place of ``sampling``; None: that.
        on_finished: called with responses soon after they have ended.

    Raises:
        WorkerError: a worker raised or died.
    """
    rooms = workers.run("start_generation")[::copies]
    masks = prompts.attention_mask.bool()
    prompt_ids = [ids[mask].tolist() for ids, mask in zip(prompts.input_ids, masks, strict=True)]
    uids = prompts.uid.tolist()
    parts: list[FinishedResponses] = []

    def message(rows: Sequence[int]) -> tuple[ResponseRequests, int]:
        of_prompt = [row // sampling.n for row in rows]
        requests = ResponseRequests(
            rows=list(rows),
            prompt_ids=[prompt_ids[i] for i in of_prompt],
            uids=[uids[i] for i in of_prompt],
            places=[row % sampling.n for row in rows],
            sampling=sampling,
            seed=seed,
            overrides=None if settings is None else settings.overrides_of(rows),
            temperatures=None if settings is None else settings.tables_of(rows),
        )
        return requests, STEPS_PER_CALL

    def take(part: FinishedResponses) -> tuple[int, int]:
        if part.rows:
            parts.append(part)
            on_finished(part)
        return part.num_ended, part.num_waiting

    queue = RequestQueue(len(prompts) * sampling.n, rooms)
    serve(queue, Exchange(workers, "advance", copies), message, take, deterministic)
    return collect(prompts, parts, sampling.n, max_response_length, pad_token_id)


def serve(
    queue: RequestQueue,
    engines: Messages,
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
