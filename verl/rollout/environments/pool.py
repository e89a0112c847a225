"""Runs the environments of conversations in separate processes.

An environment has ``start(record) -> state`` and ``step(state, turn) -> (state, messages, done, reward)``, which may be
``async``. Its state consists of JSON values and tensors and is stored with the conversation, so any process can run any
step. Messages have ``role`` and ``content``; a message with ``failed: True`` counts as a failed call.
"""

import asyncio
import inspect
import json
import math
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, NamedTuple, Self

from verl.config.errors import ConfigError
from verl.config.rollout import MultiTurnConfig
from verl.data.prompt_rows import PromptRecord
from verl.rollout.environments.tools import ToolEnvironment, Turn, load_tools
from verl.utils.json_state import from_json, to_json
from verl.utils.process_pool import KillablePool, failure_reason, spare_cores
from verl.utils.user_code import check_signature, load_code, user_code

FIELD = "rollout.multi_turn.environment"

COUNTS = ("calls", "malformed", "failures", "timeouts", "prefilled_tokens")
"""Counters of a conversation: tool calls; turns with an unreadable call; failed calls; steps aborted because they
exceeded the time or memory limit or their process died; and tokens that engines read without having sampled them, minus
cache hits."""

TOGETHER = 64
"""Number of ``async`` steps that are retried together if their process had to be killed."""

MARGIN_S = 5.0
"""Seconds after a step's time limit at which a process with ``async`` steps is killed."""

EXCHANGE_S = 0.05
"""Maximum seconds to wait for a reply to ``async`` steps before checking for new steps to start."""


class Step(NamedTuple):
    """Request for one step of an environment."""

    record: PromptRecord
    state: str
    """State as JSON; empty before the first step."""
    turn: Turn


class Answer(NamedTuple):
    """Reply of an environment."""

    state: str
    messages: list[dict[str, Any]]
    done: bool
    reward: float
    counts: tuple[int, ...]
    """Increments of the counters in :data:`COUNTS`."""


def load_environment(options: MultiTurnConfig) -> Any:
    """Load the environment selected by the options.

    Raises:
        ConfigError: If the environment cannot be loaded or created, or lacks a method.
    """
    if options.environment is None:
        return ToolEnvironment(load_tools(options), options)
    where, made = f"{FIELD}={options.environment!r}", load_code(options.environment, FIELD)
    with user_code(f"{where}: making it"):
        environment = made()
    for method, inputs in {"start": ["record"], "step": ["state", "turn"]}.items():
        if not callable(getattr(environment, method, None)):
            raise ConfigError(f"{where}: has no method {method}; it needs start(record) and step(state, turn)")
        check_signature(f"{where}.{method}", getattr(environment, method), inputs, {})
    return environment


class EnvironmentPool(KillablePool):
    """Pool of processes that run environment steps; all ``async`` steps share one process and its event loop."""

    def __init__(self, options: MultiTurnConfig, busy_cores: int = 1) -> None:
        """Prepare the processes, assuming that other work occupies ``busy_cores`` of this machine's cores.

        Raises:
            ConfigError: See :func:`load_environment`.
        """
        self.options = options
        self.role = "tool" if options.has_tools else "user"
        self.is_async = is_async(load_environment(options))
        self._new = SimpleQueue[tuple[Step, Future[Answer]]]()
        """``async`` steps that have not been sent to the process yet."""
        super().__init__(
            "environment process",
            "rollout.multi_turn",
            1 if self.is_async else options.num_workers or spare_cores(busy_cores),
            options.timeout_s + (MARGIN_S if self.is_async else 0),
            options.memory_limit_mb,
            _prepare,
            options,
            users_code=True,
        )

    def __enter__(self) -> Self:
        # Start importing now, so that the imports overlap with the work before the first turn.
        self.submit(self.run, _take_steps, [[]])
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, steps: Sequence[Step]) -> list[Future[Answer]]:
        """Start these steps, which run concurrently and, if ``async``, also alongside steps that are already running.

        The futures' ``result`` raises ``ConfigError`` for any exception raised by the environment.
        """
        pairs = [(step, Future[Answer]()) for step in steps]
        if self.is_async:
            for each in pairs:
                self._new.put(each)
            self.submit(self._converse)
        else:
            self.submit(self._answer, pairs)
        return [future for _, future in pairs]

    def _answer(self, pairs: Sequence[tuple[Step, Future[Answer]]]) -> None:
        try:
            answers = self._answers([step for step, _ in pairs])
        except Exception as error:  # raised by the futures
            for _, future in pairs:
                future.set_exception(error)
            return
        for (_, future), answer in zip(pairs, answers, strict=True):
            future.set_result(answer)

    def _converse(self) -> None:
        """Send ``async`` steps to the process as they arrive, and collect replies until none is pending."""
        waiting: dict[int, tuple[float, Step, Future[Answer]]] = {}
        numbers = count()
        while waiting or not self._new.empty():
            new: dict[int, Step] = {}
            while not self._new.empty():
                number, (step, future) = next(numbers), self._new.get()
                waiting[number], new[number] = (time.monotonic(), step, future), step
            try:
                (outcome,) = self.run(_exchange, [new])
            except Exception as error:  # raised by the futures
                outcome = [(number, error) for number in waiting]
            lost = isinstance(outcome, BaseException)
            for number, answer in [] if lost else outcome:
                _, step, future = waiting.pop(number)
                try:
                    future.set_result(self._failure(answer, step) if isinstance(answer, BaseException) else answer)
                except Exception as error:  # raised by the environment
                    future.set_exception(error)
            # The event loop cannot enforce the time limit of a step that blocks it.
            if waiting and time.monotonic() > next(iter(waiting.values()))[0] + self.options.timeout_s + MARGIN_S:
                self.run(_leave, [None])
                lost = True
            if lost:
                self._answer([(step, future) for _, step, future in waiting.values()])
                waiting.clear()

    def _answers(self, steps: list[Step]) -> list[Answer]:
        together = TOGETHER if self.is_async else 1
        chunks = [steps[i : i + together] for i in range(0, len(steps), together)]
        answers: list[Answer | None] = []
        for chunk, outcome in zip(chunks, self.run(_take_steps, chunks), strict=True):
            if not isinstance(outcome, BaseException):
                answers += outcome
            elif len(chunk) == 1:
                answers.append(self._failure(outcome, chunk[0]))
            else:
                answers += [None] * len(chunk)
        # Steps that shared a process with an aborted one are retried separately.
        again = [i for i, answer in enumerate(answers) if answer is None]
        for i, outcome in zip(again, self.run(_take_steps, [[steps[i]] for i in again]), strict=True):
            failed = isinstance(outcome, BaseException)
            answers[i] = self._failure(outcome, steps[i]) if failed else outcome[0]
        return [answer for answer in answers if answer is not None]

    def _failure(self, error: BaseException, step: Step) -> Answer:
        """Return the reply to a step if ``error`` means that it was aborted; otherwise, raise ``error``."""
        reason = failure_reason(error)
        if reason is None:
            raise error if isinstance(error, Exception) else RuntimeError(f"{FIELD}: {type(error).__name__}")
        return ended(step, reason, self.options)


def is_async(environment: Any) -> bool:
    """Return whether the environment's steps run together in one process."""
    return bool(getattr(environment, "is_async", inspect.iscoroutinefunction(environment.step)))


def ended(step: Step, reason: str, options: MultiTurnConfig) -> Answer:
    """Return the reply to a failed step: ``reason`` as a message for each call, and the state unchanged.

    An environment of the user's that fails before its first state is not asked again, because it would start again.
    """
    why = {"timeout": f"no answer within {options.timeout_s:g} s", "memory": "out of memory"}.get(reason, reason)
    names = [call.name for call in step.turn.calls[: options.max_parallel_calls]] or ["environment"]
    role = "tool" if options.has_tools else "user"
    messages = [{"role": role, "name": name, "content": f"Error: {why}"} for name in names]
    timeouts = int(reason == "timeout")
    counts = (len(step.turn.calls), int(step.turn.malformed), 1 - timeouts, timeouts, 0)
    return Answer(step.state, messages, not step.state and not options.has_tools, 0.0, counts)


# --- In the processes ---

_ENVIRONMENT: list[tuple[Any, MultiTurnConfig]] = []


def _prepare(options: MultiTurnConfig) -> None:
    """Prepare a process of the pool."""
    _ENVIRONMENT[:] = [(load_environment(options), options)]


def _take_steps(steps: list[Step]) -> list[Answer]:
    ((environment, options),) = _ENVIRONMENT
    return asyncio.run(_take_together(environment, steps, options))


_LOOP: list[tuple[asyncio.AbstractEventLoop, SimpleQueue[tuple[int, Any]]]] = []


def _exchange(new: dict[int, Step]) -> list[tuple[int, Answer | BaseException]]:
    """Start steps in this process's event loop, which has its own thread, and return available replies by number."""
    if not _LOOP:
        _LOOP[:] = [(asyncio.new_event_loop(), SimpleQueue())]
        Thread(target=_LOOP[0][0].run_forever, daemon=True).start()
    ((environment, options),), ((loop, done),) = _ENVIRONMENT, _LOOP
    for number, step in new.items():
        future = asyncio.run_coroutine_threadsafe(_guarded(environment, step, options), loop)
        future.add_done_callback(partial(lambda number, future: done.put((number, future)), number))
    ready = []
    with suppress(Empty):
        ready.append(done.get(timeout=EXCHANGE_S))
        while True:
            ready.append(done.get_nowait())
    return [(number, future.exception() or future.result()) for number, future in ready]


def _leave(_: None) -> None:
    os._exit(1)


async def _take_together(environment: Any, steps: list[Step], options: MultiTurnConfig) -> list[Answer]:
    return list(await asyncio.gather(*(_guarded(environment, step, options) for step in steps)))


async def _guarded(environment: Any, step: Step, options: MultiTurnConfig) -> Answer:
    try:
        if not is_async(environment):
            return await take_step(environment, step)
        return await asyncio.wait_for(take_step(environment, step), options.timeout_s)
    except TimeoutError:
        return ended(step, "timeout", options)
    except ConfigError as error:
        if isinstance(error.__cause__, MemoryError):
            return ended(step, "memory", options)
        raise


async def take_step(environment: Any, step: Step) -> Answer:
    """Run one step, calling ``start`` before the first; raise ``ConfigError`` for exceptions in user code."""
    where = FIELD if isinstance(environment, ToolEnvironment) else f"{FIELD}={type(environment).__name__}"
    state: Any = from_json(json.loads(step.state)) if step.state else None
    if not step.state:
        with user_code(f"{where}: start(record)"):
            state = await _awaited(environment.start(step.record))
        # From its first step on, an environment gets its state as a checkpoint would return it.
        state = from_json(json.loads(_saved(state, where)))
    with user_code(f"{where}: step(state, turn)"):
        returned = await _awaited(environment.step(state, step.turn))
    form = "returned {}; expected (state, messages, done, reward)"
    if not isinstance(returned, tuple | list) or len(returned) != 4:
        raise ConfigError(f"{where}: step(state, turn) {form.format(type(returned).__name__)}")
    state, messages, done, reward = returned
    saved = _saved(state, where)
    with user_code(f"{where}: reading what step(state, turn) returned"):
        checked = [checked_message(message, where) for message in messages or []]
        done = bool(done)
        value = 0.0 if reward is None else _number(reward)
    if not math.isfinite(value):
        raise ConfigError(f"{where}: returned the reward {reward!r:.100}; expected None or a finite number")
    timeouts = sum(message.get("timed_out") is True for message in checked)
    failures = sum(message.get("failed") is True for message in checked) - timeouts
    counts = (len(step.turn.calls), int(step.turn.malformed), failures, timeouts, 0)
    return Answer(saved, checked, done, value, counts)


def _saved(state: Any, where: str) -> str:
    """Return an environment's state as JSON; raise ``ConfigError`` if a checkpoint cannot hold it."""
    try:
        return json.dumps(to_json(state))
    except (TypeError, RecursionError) as error:
        raise ConfigError(f"{where}: its state: {error}; keep JSON values and tensors") from error


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def checked_message(message: Any, where: str) -> dict[str, Any]:
    """Return an environment's message; raise ``ConfigError`` if it is malformed."""
    fits = isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
    fits = fits and message["role"] != ""
    if not isinstance(message, dict) or not fits:
        raise ConfigError(f"{where}: returned the message {message!r:.200}; expected a dict with role and content")
    return message
