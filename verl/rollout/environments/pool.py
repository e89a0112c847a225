"""Runs the environments of conversations in separate processes.

An environment has ``start(record) -> state`` and ``step(state, turn) -> (state, messages, done, reward)``, which may be
``async``. The state consists of JSON values and tensors and is stored with the conversation, so any process can run any
step. Messages have ``role`` and ``content``. A message with ``failed: True`` counts as a failed call.
"""

import asyncio
import inspect
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, Self

from verl.config.errors import ConfigError
from verl.config.rollout import MultiTurnConfig
from verl.data.prompt_record import Begin, PromptRecord
from verl.rollout.environments.live import LiveEnvironment
from verl.rollout.environments.reward_functions import FIELD as REWARD_FUNCTIONS
from verl.rollout.environments.reward_functions import finite_reward
from verl.rollout.environments.tools import ENVIRONMENT_FIELD as FIELD
from verl.rollout.environments.tools import (
    ToolEnvironment,
    Turn,
    awaited,
    environment_name,
    environment_option,
    is_live,
    load_tools,
    tool_schemas,
)
from verl.utils.background import drain, start_loop
from verl.utils.files import print_to
from verl.utils.json_state import from_json, to_json
from verl.utils.process_pool import KillablePool, failure_reason, spare_cores
from verl.utils.user_code import check_signature, definition, load_code, user_code

COUNTS = ("calls", "malformed", "failures", "timeouts", "replay_differences", "prefilled_tokens")
"""Counters of a conversation: tool calls, turns with an invalid call, failed calls or steps, timeouts of calls or
steps, changed results of recreated objects, and prefilled tokens. A step fails if it runs out of memory or its process
dies. Prefilled tokens are the prompt tokens of all turns, minus cache hits."""

ENVIRONMENT_LOG = "environment.log"
"""Name of the log file for the output of tools and environments."""

TOGETHER = 64
"""Number of ``async`` steps that are retried together after their process was killed."""

MARGIN_S = 5.0
"""Seconds between the time limit of an ``async`` step and the termination of its process."""

EXCHANGE_S = 0.05
"""Maximum seconds to wait for replies to ``async`` steps before checking for new steps."""


class EnvironmentStep(NamedTuple):
    """Request for one step of an environment."""

    record: PromptRecord
    state: str
    """State as JSON, or an empty string before the first step."""
    turn: Turn


class Answer(NamedTuple):
    """Reply of an environment."""

    state: str
    messages: list[dict[str, Any]]
    done: bool
    reward: float
    counts: tuple[int, ...]
    """Amounts to add to the counters in :data:`COUNTS`."""


def load_environments(options: MultiTurnConfig) -> dict[str, Any]:
    """Load the environments that the options select, keyed by name. If there is only one, its name is empty.

    Raises ``ConfigError`` as :func:`load_environment`.
    """
    return {name: load_environment(options, name) for name in options.environments or [""]}


def load_environment(options: MultiTurnConfig, name: str = "") -> Any:
    """Load the environment of this name.

    Raises:
        ConfigError: If the environment cannot be loaded or created, or lacks a method.
    """
    if options.environment is None:
        return ToolEnvironment(load_tools(options), options)
    where, made = environment_option(options, name), load_code(options.environments[name], FIELD)
    if is_live(made):
        return LiveEnvironment(made, options, where)
    if options.reward_functions:
        fix = "have no object to score; let step return rewards, or write a class with reset as in TRL"
        raise ConfigError(f"{REWARD_FUNCTIONS}={options.reward_functions}: conversations of {where} {fix}")
    with user_code(f"{where}: making it"):
        environment = made()
    for method, inputs in {"start": ["record"], "step": ["state", "turn"]}.items():
        if not callable(getattr(environment, method, None)):
            raise ConfigError(f"{where}: has no method {method}; it needs start(record) and step(state, turn)")
        check_signature(f"{where}.{method}", getattr(environment, method), inputs, {})
    return environment


def role_of(environment: Any) -> str:
    """Return the role of an environment's messages."""
    return "tool" if isinstance(environment, ToolEnvironment | LiveEnvironment) else "user"


@contextmanager
def beginning(options: MultiTurnConfig) -> Iterator[Begin | None]:
    """Yield :meth:`EnvironmentPool.begin`, or None if the only configured environment has no ``observe`` method."""
    pool = EnvironmentPool(options) if options.enable and options.environment is not None else None
    if pool is None or not (pool.observing or isinstance(options.environment, dict)):
        yield None
    else:
        with pool:
            yield pool.begin


class EnvironmentPool(KillablePool):
    """Pool of processes that run environment steps. All ``async`` steps share one process and its event loop."""

    def __init__(self, options: MultiTurnConfig, busy_cores: int = 1, log: Path | None = None) -> None:
        """Prepare the processes.

        Args:
            busy_cores: Number of this machine's cores that other work occupies.
            log: File that receives the output of tools and environments, or None to leave it on standard output.

        Raises:
            ConfigError: See :func:`load_environment`.
        """
        self.options = options
        self.environments = load_environments(options)
        self.role = role_of(next(iter(self.environments.values())))
        """Role of the messages of the first environment. Roles of others are checked in :func:`check_conversations`."""
        self.observing = {n for n, made in self.environments.items() if callable(getattr(made, "observe", None))}
        """Names of the environments that have a first observation."""
        self.is_async = any(is_async(environment) for environment in self.environments.values())
        self._new = SimpleQueue[tuple[EnvironmentStep, Future[Answer]]]()
        """Steps that have not been sent to a process yet."""
        super().__init__(
            "environment process",
            "rollout.multi_turn",
            1 if self.is_async else options.num_workers or spare_cores(busy_cores),
            options.timeout_s + (MARGIN_S if self.is_async else 0),
            options.memory_limit_mb,
            _prepare,
            options,
            log,
            users_code=True,
        )

    def __enter__(self) -> Self:
        # Start importing now, so that the imports overlap with the work before the first turn.
        self.submit(self.run, _take_steps, [[]])
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, steps: Sequence[EnvironmentStep]) -> list[Future[Answer]]:
        """Start these steps concurrently. Steps that are ``async`` can also overlap with earlier steps.

        Calling ``result`` on a future raises ``ConfigError`` if the environment raised an exception.
        """
        futures = [Future[Answer]() for _ in steps]
        for pair in zip(steps, futures, strict=True):
            self._new.put(pair)
        self.submit(self._converse if self.is_async else self._answer_new)
        return futures

    def settles(self, record: PromptRecord) -> bool:
        """Return whether the record's environment computes a single reward, at the end of the conversation."""
        environment = self._environment_of(record)
        return isinstance(environment, LiveEnvironment) and environment.gives_reward

    def _environment_of(self, record: PromptRecord) -> Any:
        return self.environments[environment_name(record.extra_info, self.options)]

    def begin(self, records: list[PromptRecord], places: Sequence[str]) -> list[PromptRecord]:
        """Return the records, each with the initial state and first observation of its environment.

        If the run has several environments, each record also gets the tools of its own.

        Args:
            places: Names of the records in messages.

        Raises:
            ConfigError: If an environment raises an exception, exceeds a limit or returns malformed messages, or if a
                record names no environment or lacks a column that a reward function needs.
        """
        begun = [self._checked(record, place) for record, place in zip(records, places, strict=True)]
        chosen = [environment_name(record.extra_info, self.options) for record in begun]
        shown = [i for i, name in enumerate(chosen) if name in self.observing]
        inputs = [begun[i] for i in shown]
        outcomes = self.submit(self.run, partial(_begin, begin=first_observation), inputs).result()
        for i, outcome in zip(shown, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                reason = failure_reason(outcome)
                if reason is None:
                    raise outcome
                limits = f"timeout_s={self.options.timeout_s:g} and memory_limit_mb={self.options.memory_limit_mb}"
                where = f"{environment_option(self.options, chosen[i])}: the first observation of {places[i]}"
                raise ConfigError(f"{where}: {reason}; its limits are {limits}")
            begun[i] = begun[i].observing(*outcome)
        return begun

    def _checked(self, record: PromptRecord, place: str) -> PromptRecord:
        """Return the record with its tools. Raise ``ConfigError`` if it has no environment or lacks a column."""
        if isinstance(self.options.environment, dict):
            name = record.extra_info.get("environment")
            if name not in list(self.environments):
                names = ", ".join(self.environments)
                raise ConfigError(f"{place}: environment={name!r:.80}: must be one of {names}, the names in {FIELD}")
            record = replace(record, tools=record.tools or self._schemas[name])
        environment = self._environment_of(record)
        if isinstance(environment, LiveEnvironment):
            environment.functions.check_columns(record.extra_info, place)
        return record

    @cached_property
    def _schemas(self) -> dict[str, list[dict[str, Any]]]:
        return {name: tool_schemas(self.options, name) for name in self.environments}

    def _answer_new(self) -> None:
        """Run all steps in the queue and store the replies in their futures."""
        self._answer(drain(self._new))

    def _answer(self, pairs: Sequence[tuple[EnvironmentStep, Future[Answer]]]) -> None:
        try:
            answers = self._answers([step for step, _ in pairs])
        except Exception as error:  # raised by the futures
            for _, future in pairs:
                future.set_exception(error)
            return
        for (_, future), answer in zip(pairs, answers, strict=True):
            future.set_result(answer)

    def _converse(self) -> None:
        """Send ``async`` steps to the process as they arrive, and collect replies until no steps are pending."""
        waiting: dict[int, tuple[float, EnvironmentStep, Future[Answer]]] = {}
        numbers = count()
        while waiting or not self._new.empty():
            new: dict[int, EnvironmentStep] = {}
            for number, (step, future) in zip(numbers, drain(self._new), strict=False):
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
                self.run(os._exit, [1])
                lost = True
            if lost:
                self._answer([(step, future) for _, step, future in waiting.values()])
                waiting.clear()

    def _answers(self, steps: list[EnvironmentStep]) -> list[Answer]:
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

    def _failure(self, error: BaseException, step: EnvironmentStep) -> Answer:
        """Return the reply to a step that ``error`` aborted, or raise ``error`` if it has another cause."""
        reason = failure_reason(error)
        if reason is None:
            raise error if isinstance(error, Exception) else RuntimeError(f"{FIELD}: {type(error).__name__}")
        if not step.state:
            # Either start or the first step was aborted; a conversation whose start fails cannot continue.
            (state,) = self.run(partial(_begin, begin=start_state), [step.record])
            step = step._replace(state="" if isinstance(state, BaseException) else state)
        return ended(step, reason, self.options)


def is_async(environment: Any) -> bool:
    """Return whether the environment's steps are ``async`` and therefore run concurrently in one process."""
    return bool(getattr(environment, "is_async", inspect.iscoroutinefunction(environment.step)))


def ended(step: EnvironmentStep, reason: str, options: MultiTurnConfig) -> Answer:
    """Return the reply to an aborted step: an error message for each call, and the unchanged state.

    If a custom environment fails before it has a state, the conversation ends, because a retry would start over.
    """
    why = {"timeout": f"no answer within {options.timeout_s:g} s", "memory": "out of memory"}.get(reason, reason)
    calls = step.turn.calls[: options.max_parallel_calls] if options.has_tools else []
    names, role = [call.name for call in calls] or ["environment"], "tool" if options.has_tools else "user"
    messages = [{"role": role, "name": name, "content": f"Error: {why}"} for name in names]
    timeouts = int(reason == "timeout")
    counts = (len(step.turn.calls), int(step.turn.malformed), 1 - timeouts, timeouts, 0, 0)
    return Answer(step.state, messages, not step.state and not options.has_tools, 0.0, counts)


# --- In the processes ---

_ENVIRONMENTS: list[tuple[dict[str, Any], MultiTurnConfig]] = []
"""The environments by name, and the options."""


def _prepare(options: MultiTurnConfig, log: Path | None) -> None:
    if log is not None:
        # Otherwise, the output of tools would be mixed with the run's progress lines.
        print_to(log, 1)
    _ENVIRONMENTS[:] = [(load_environments(options), options)]


def _of(record: PromptRecord) -> Any:
    """Return the environment of a record."""
    ((environments, options),) = _ENVIRONMENTS
    return environments[environment_name(record.extra_info, options)]


def _take_steps(steps: list[EnvironmentStep]) -> list[Answer]:
    async def answers() -> list[Answer]:
        return list(await asyncio.gather(*map(_guarded, steps)))

    return asyncio.run(answers())


def _begin(record: PromptRecord, begin: Callable[[Any, PromptRecord], Any]) -> Any:
    return asyncio.run(begin(_of(record), record))


_LOOP: list[tuple[asyncio.AbstractEventLoop, SimpleQueue[tuple[int, Any]]]] = []


def _exchange(new: dict[int, EnvironmentStep]) -> list[tuple[int, Answer | BaseException]]:
    """Start steps in the event loop thread of this process, and return available replies with their step numbers."""
    if not _LOOP:
        _LOOP[:] = [(start_loop(), SimpleQueue())]
    ((loop, done),) = _LOOP
    for number, step in new.items():
        future = asyncio.run_coroutine_threadsafe(_guarded(step), loop)
        future.add_done_callback(partial(lambda number, future: done.put((number, future)), number))
    return [(number, future.exception() or future.result()) for number, future in drain(done, EXCHANGE_S)]


async def _guarded(step: EnvironmentStep) -> Answer:
    environment, ((_, options),) = _of(step.record), _ENVIRONMENTS
    # Tool calls have separate time limits. Synchronous steps that take too long are killed with their process.
    limited = is_async(environment) and not isinstance(environment, ToolEnvironment)
    seconds = options.timeout_s if limited else None
    try:
        async with asyncio.timeout(seconds):
            if not step.state:
                step = step._replace(state=await start_state(environment, step.record))
            return await take_step(environment, step)
    except TimeoutError:
        return ended(step, "timeout", options)
    except ConfigError as error:
        if isinstance(error.__cause__, MemoryError):
            return ended(step, "memory", options)
        raise
    except asyncio.CancelledError as error:  # raised by the environment, because nothing cancels a step
        raise ConfigError(f"{name_of(environment)}: raised CancelledError") from error


def name_of(environment: Any) -> str:
    """Return the option and class of an environment for use in error messages."""
    if isinstance(environment, LiveEnvironment):
        return environment.where
    return FIELD if isinstance(environment, ToolEnvironment) else f"{FIELD}={type(environment).__name__}"


async def start_state(environment: Any, record: PromptRecord) -> str:
    """Return the initial state as JSON. Raise ``ConfigError`` for exceptions in user code."""
    where = name_of(environment)
    with user_code(f"{where}: start(record)"):
        state = await awaited(environment.start(record))
    return _saved(state, where)


async def first_observation(environment: Any, record: PromptRecord) -> tuple[str, list[dict[str, Any]]]:
    """Return the initial state as JSON and the first messages. Raise ``ConfigError`` for exceptions in user code."""
    state, where = await start_state(environment, record), f"{name_of(environment)}: observe(state)"
    with user_code(where):
        messages = await awaited(environment.observe(from_json(json.loads(state))))
    return state, checked_messages(messages, where)


def _saved(state: Any, where: str) -> str:
    try:
        return json.dumps(to_json(state))
    except (TypeError, RecursionError) as error:
        raise ConfigError(f"{where}: its state: {error}; keep JSON values and tensors") from error


async def take_step(environment: Any, step: EnvironmentStep) -> Answer:
    """Run one step, calling ``start`` before the first step. Raise ``ConfigError`` for exceptions in user code."""
    where = name_of(environment)
    state = from_json(json.loads(step.state or await start_state(environment, step.record)))
    with user_code(f"{where}: step(state, turn)"):
        further = [step.record] if isinstance(environment, ToolEnvironment) else []
        returned = await awaited(environment.step(state, step.turn, *further))
    where += scorer(environment)
    if not isinstance(returned, tuple | list) or len(returned) != 4:
        kind = type(returned).__name__
        raise ConfigError(f"{where} returned {kind}; expected (state, messages, done, reward)")
    state, messages, done, reward = returned
    checked = checked_messages(messages, where)
    timeouts = sum(message.get("timed_out") is True for message in checked)
    failures = sum(message.get("failed") is True for message in checked) - timeouts
    differing = sum(message.get("differing", 0) for message in checked if isinstance(environment, LiveEnvironment))
    counts = (len(step.turn.calls), int(step.turn.malformed), failures, timeouts, differing, 0)
    return Answer(_saved(state, where), checked, _flag(done, where), finite_reward(reward, where), counts)


def scorer(environment: Any) -> str:
    """Describe the user code that ``step`` runs, for error messages. Most adapters inherit ``step`` itself."""
    if isinstance(environment, LiveEnvironment):
        return f": get_reward(){definition(getattr(environment.made, 'get_reward', environment.made))}"
    made = type(environment)
    return f": step(state, turn){definition(environment.step if 'step' in vars(made) else made)}"


def _flag(done: Any, where: str) -> bool:
    try:
        return bool(done)
    except Exception as error:  # arrays have no truth value
        raise ConfigError(f"{where} returned done={done!r:.80}; expected true or false") from error


def checked_messages(messages: Any, where: str) -> list[dict[str, Any]]:
    """Return messages as a list, or [] for None. Raise ``ConfigError`` if a message is malformed."""
    if not isinstance(messages or [], list | tuple):
        raise ConfigError(f"{where} returned the messages {messages!r:.200}; expected a list of dicts")
    for message in messages or []:
        fits = isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
        if not fits or not message["role"]:
            raise ConfigError(f"{where} returned the message {message!r:.200}; expected a dict with role and content")
    return list(messages or [])
