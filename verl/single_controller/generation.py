"""Assigns requests to all engines of a run and samples the responses."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from verl.batch import Batch
from verl.cluster.failures import MachineError, WorkerError
from verl.config.rollout import SamplingConfig
from verl.data.prompt_record import PromptRecord
from verl.rollout.agents.sessions import Sessions
from verl.rollout.environments.conversations import Conversations, ConversationSetup, add_rank_metrics
from verl.rollout.multi_turn import begin_conversations
from verl.rollout.queue import EngineCapacity, RequestQueue
from verl.rollout.requests import ResponseRequests, occurrences, response_stream
from verl.single_controller.worker_group import WorkerGroup

STEPS_PER_CALL = 32
"""Number of steps that an engine runs before it replies."""


@dataclass(eq=False)
class EngineCalls:
    """Calls to the engines of a worker group, with at most one pending call per engine."""

    workers: WorkerGroup
    method: str
    """Name of the worker method to call."""
    ranks_per_engine: int
    """Number of consecutive workers per engine. All are called, but only the result of the first worker is used."""

    def __post_init__(self) -> None:
        self._ranks = self.workers.living.copy()
        self._calls: dict[int, list[Any]] = {}
        self._results: dict[Any, Any] = {}
        self._started = time.monotonic()

    @property
    def busy(self) -> bool:
        """Whether any engine still has to reply."""
        return bool(self._calls)

    def send(self, engine: int, *arguments: Any) -> None:
        """Send a call to ``engine``, which must be idle."""
        assert engine not in self._calls, f"engine {engine} is busy"
        ranks = self._ranks[engine * self.ranks_per_engine : (engine + 1) * self.ranks_per_engine]
        self._calls[engine] = [self.workers.call(rank, self.method, arguments) for rank in ranks]

    def check(self) -> None:
        """Check for failures and time limits between replies."""
        self.workers.check(self.method, self._started)

    def receive(self, from_all: bool) -> list[tuple[int, Any]]:
        """Wait for one or all busy engines, and return ``(engine, reply)`` for those that have replied.

        The reply of a lost engine is None. Raises ``WorkerError`` if a worker raised an exception, or if a worker was
        lost and the others cannot continue without it.
        """
        engines = {call: engine for engine, calls in self._calls.items() for call in calls}
        ranks = {
            call: self._ranks[engine * self.ranks_per_engine + copy]
            for engine, calls in self._calls.items()
            for copy, call in enumerate(calls)
            if call not in self._results
        }
        replied: list[tuple[int, Any]] = []
        try:
            for call, result in self.workers.completed(ranks, self.method, self._started):
                self._results[call] = result
                if not from_all and self._has_replied(engines[call]):
                    break
        except MachineError as error:
            engine = self._ranks.index(self.workers.leave_out(error)) // self.ranks_per_engine
            # There is no pending call if the lost engine was idle.
            self._calls.pop(engine, None)
            replied.append((engine, None))
        for engine in [engine for engine in sorted(self._calls) if self._has_replied(engine)]:
            replies = [self.workers.received(self._results.pop(call)) for call in self._calls.pop(engine)]
            replied.append((engine, replies[0]))
        return replied

    def _has_replied(self, engine: int) -> bool:
        return all(call in self._results for call in self._calls[engine])


def generate_responses(
    workers: WorkerGroup,
    ranks_per_engine: int,
    records: Sequence[PromptRecord],
    sampling: SamplingConfig,
    seed: int,
    max_response_length: int,
    deterministic: bool = True,
    on_finished: Callable[[Batch], None] = lambda part: None,
    settings: Mapping[str, Any] | None = None,
    conversations: ConversationSetup | None = None,
    version: int | None = None,
) -> Batch:
    """Sample ``sampling.n`` responses per prompt. Responses to the same prompt are adjacent.

    Raises ``WorkerError`` if a worker raises an exception or dies.

    Args:
        workers, ranks_per_engine, deterministic, on_finished, version: See :class:`Generation`.
        settings: ``overrides`` and ``temperatures`` of :class:`ResponseRequests`.
        conversations: Setup of multi-turn conversations, or None if each response has a single turn.

    Returns:
        Episodes with ``tokens``, ``rollout_logprobs``, ``truncated`` and rank metrics; R = ``max_response_length``.
    """
    n = sampling.n
    prompts = [record for record in records for _ in range(n)]
    requests = ResponseRequests(
        rows=range(len(prompts)),
        prompt_ids=[record.input_ids for record in prompts],
        # Duplicates of a prompt have separate random streams.
        streams=[
            response_stream(seed, record.uid, times * n + i)
            for record, times in zip(records, occurrences(records), strict=True)
            for i in range(n)
        ],
        sampling=sampling,
        **(settings or {}),
    )
    parts: list[Batch] = []

    def take(part: Batch) -> None:
        parts.append(part)
        on_finished(part)

    started = None if conversations is None else begin_conversations(conversations, prompts)
    engines = (workers, ranks_per_engine, requests, deterministic, take)
    _, metrics = Generation(*engines, conversations=started, version=version).run()
    batch = Batch.join(parts)
    assert batch.request.sort().values.equal(torch.arange(len(prompts))), "each response is sampled once"
    batch = add_rank_metrics(batch[batch.request.argsort()], metrics)
    return batch.without("request").widened(max_response_length)


@dataclass(eq=False)
class Generation:
    """A pass of all engines over ``requests``, which are identified by their indices in the batch.

    Raises ``WorkerError`` if an engine's weights do not have the required ``version``.
    """

    workers: WorkerGroup
    """Workers that contain an engine, such as :class:`verl.workers.hybrid.HybridWorker`."""
    ranks_per_engine: int
    """Number of consecutive workers that form one engine."""
    requests: ResponseRequests
    deterministic: bool
    """Whether to assign the remaining requests only after all engines have replied. The assignment then depends on
    response lengths in steps, not on engine speed. Otherwise, an engine receives more requests as soon as it
    replies."""
    on_finished: Callable[[Batch], None]
    """Callback that receives responses shortly after they finish."""
    enough: Callable[[Sequence[int]], bool] | None = None
    """Callback that receives all finished responses after each round of replies and returns True to interrupt the
    remaining ones. If None, sampling continues until all responses have finished."""
    conversations: Conversations | Sessions | None = None
    """Multi-turn conversations of the requests, or None for single-turn responses."""
    steps_per_call: int | None = None
    """Number of engine steps between two replies, or None for ``STEPS_PER_CALL``."""
    version: int | None = None
    """Required version of the engines' weights, or None to accept any version."""

    def __post_init__(self) -> None:
        engines: list[EngineCapacity] = self._call_all("start_generation")
        for engine, found in enumerate(capacity.version for capacity in engines):
            if self.version is not None and found != self.version:
                raise WorkerError(
                    f"engine {engine} holds version {found} of the weights, not {self.version}: it would sample with "
                    "the policy of another step; please report this with the run's options"
                )
        num_first = len(self.requests.rows) if self.conversations is None else self.conversations.num_first
        self.queue = RequestQueue(num_first, engines)
        self.calls = EngineCalls(self.workers, "rollout.advance", self.ranks_per_engine)
        self.ended: list[int] = []
        """Indices of finished responses, in order of completion."""

    def run(self) -> tuple[list[Batch], Batch | None]:
        """Sample until all responses have finished or ``enough`` returns True.

        Returns:
            Cut and unstarted responses in the format of ``requests.partial``, with their ``request``; and the rank
            metrics of conversations by ``request``, or None if engines return them with the responses.
        """
        queue, calls, conversations = self.queue, self.calls, self.conversations
        idle, waiting, stopped = set[int](), False, False
        # 1. Send every engine its first requests, even an empty list: engines may have to start together.
        for engine, places in enumerate(queue.first()):
            self._send(engine, places)
        while calls.busy or waiting:
            # 2. Take replies.
            from_all = queue.left > 0 or self.enough is not None or conversations is not None
            for engine, reply in calls.receive(self.deterministic and from_all) if calls.busy else ():
                if reply is None:
                    queue.lose(engine, self._unfinished(engine))
                else:
                    self._take(engine, *reply)
                    idle.add(engine)
            # 3. Resume conversations whose environments have replied; wait for a reply if all engines are idle.
            if conversations is not None:
                can_work = calls.busy or (not stopped and (any(queue.held) or queue.left > 0))
                wait = self.deterministic or not can_work
                waiting = conversations.resume(queue, self.deterministic, wait, calls.check)
                self._end(conversations.over())
            # 4. Stop, or send requests to engines that have room.
            stopped = self.enough is not None and self.enough(self.ended)
            for engine in [] if stopped else sorted(idle):
                places = queue.take(engine)
                if queue.held[engine]:
                    idle.remove(engine)
                    self._send(engine, places)
        # 5. Fetch the metrics before cutting, because cutting drops the hidden states.
        metrics = None
        if conversations is not None:
            measured = [part for part in self._call_all("rollout.take_rank_metrics") if part is not None]
            metrics = conversations.measured(Batch.join(measured) if measured else None)
        return [] if self.enough is None else self._cut(), metrics

    def _call_all(self, method: str) -> list[Any]:
        """Call ``method`` on all engines and return one result per engine."""
        return self.workers.run_living(method)[:: self.ranks_per_engine]

    def _send(self, engine: int, places: Sequence[int]) -> None:
        conversations = self.conversations
        requests = self.requests.of(places) if conversations is None else conversations.requests(self.requests, places)
        self.calls.send(engine, requests, self.steps_per_call or STEPS_PER_CALL)

    def _take(self, engine: int, finished: Batch | None, num_waiting: int) -> None:
        self.queue.finish(engine, 0 if finished is None else len(finished), num_waiting)
        if self.conversations is None or finished is None:
            self._end(finished)
        else:
            self.conversations.take(finished)
            self._end(self.conversations.over())

    def _end(self, responses: Batch | None) -> None:
        if responses is not None:
            self.ended += responses.request.tolist()
            self.on_finished(responses)

    def _unfinished(self, engine: int) -> list[int]:
        """Return the requests of a lost engine that other engines must complete."""
        elsewhere = {*self.ended, *(() if self.conversations is None else self.conversations.waiting)}
        return [place for place in dict.fromkeys(self.queue.dealt[engine]) if place not in elsewhere]

    def _cut(self) -> list[Batch]:
        """Return the unfinished responses. Responses of an engine lost during this call keep their original state."""
        cut = [part for part in self._call_all("rollout.cut") if part is not None]
        left = set(range(len(self.requests.rows))).difference(self.ended)
        if self.conversations is not None:
            for part in cut:
                self.conversations.update(part)
            return [self.conversations.rows(sorted(left))] if left else []
        rows = sorted(left.difference(*(part.request.tolist() for part in cut)))
        if rows and self.requests.partial is not None:
            cut.append(self.requests.partial[rows].fill(request=torch.tensor(rows)))
        return cut
