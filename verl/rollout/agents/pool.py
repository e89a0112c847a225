"""Runs agents in separate processes, as coroutines, functions in threads, or commands.

Each process runs a share of the sessions and reports to the endpoint when they start or end. The endpoint replies with
the sessions that it has closed, for example because of a time limit, and the process cancels or kills them.
"""

import asyncio
import json
import math
import os
import secrets
import shlex
import signal
import subprocess
import tempfile
import threading
import time
import traceback
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from inspect import iscoroutinefunction
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, Self

from verl.config.errors import ConfigError
from verl.config.rollout import AgentConfig, MultiTurnConfig
from verl.data.prompt_record import PromptRecord
from verl.rollout.agents.endpoint import Ended, Endpoint, Event
from verl.rollout.agents.sandboxed import SandboxedAgent, prepare_sandboxed
from verl.utils.background import drain, start_loop
from verl.utils.files import print_to
from verl.utils.process_pool import KillablePool, failure_reason, spare_cores
from verl.utils.user_code import check_signature, load_code

FIELD = "rollout.multi_turn.agent"

EXCHANGE_S = 0.1
"""Maximum interval in seconds between reports of a process. Starts and ends of sessions are reported immediately."""

STOP_S = 5.0
"""Number of seconds after which a process is replaced if a cancelled session has not ended."""

NEVER_S = 30 * 86400.0
"""Time limit in seconds for a process's share of sessions. The driver enforces a separate limit for each session."""

MAX_OUTPUT_BYTES = 1 << 16
"""Number of bytes at the end of a command's output that are searched for its reward."""

MAX_ERROR_BYTES = 1 << 20
"""Number of bytes that are copied from a sandboxed command's standard error."""

MAX_SOCKET_BYTES = 107
"""Maximum length of a Unix socket's path."""

THREADS_PER_SESSION = 4
"""Number of threads that a session may use through ``asyncio.to_thread``; a command needs up to four."""

Report = tuple[int, float | None, str]
"""Session number, reward (None when the session starts), and reason for a failure."""


class Share(NamedTuple):
    """Sessions that one process runs."""

    control_url: str
    sessions: list[tuple[int, PromptRecord, str]]
    """Number, record and base URL of each session."""
    at_once: int
    """Maximum number of concurrent sessions; when a session ends, the next one starts."""


def load_agent(options: AgentConfig) -> Any:
    """Load the agent function at ``path``, or split ``command`` into its words.

    Raises:
        ConfigError: If it cannot be loaded, does not accept ``(record, base_url, api_key)``, or cannot be sandboxed.
    """
    if options.command is not None:
        try:
            words = shlex.split(options.command)
        except ValueError as error:
            raise ConfigError(f"{FIELD}.command={options.command!r}: {error}") from error
        if not words:
            raise ConfigError(f"{FIELD}.command={options.command!r}: names no program")
        return prepare_sandboxed(words, FIELD) if options.sandbox else words
    assert options.path is not None, "AgentConfig.enabled"
    agent = load_code(options.path, f"{FIELD}.path")
    check_signature(f"{FIELD}.path={options.path!r}", agent, ["record", "base_url", "api_key"], {})
    return agent


class AgentPool(KillablePool):
    """Pool of processes that run agents, with the endpoint that serves their requests."""

    role = "user"

    def __init__(self, options: MultiTurnConfig, busy_cores: int = 1, log: Path | None = None) -> None:
        """Prepare the processes.

        Args:
            busy_cores: Number of this machine's cores that other work occupies.
            log: File that receives the output of agents, or None to leave it on standard output.
        """
        self.options = options
        self._socket = _socket_path() if options.agent.sandbox else None
        num_processes = options.num_workers or spare_cores(busy_cores)
        super().__init__(
            "agent process",
            "rollout.multi_turn",
            num_processes,
            NEVER_S,
            options.memory_limit_mb,
            _prepare,
            options,
            self._socket,
            log,
            users_code=True,
        )
        self.at_once = max(1, options.agent.max_sessions // num_processes)

    def __enter__(self) -> Self:
        self.endpoint = Endpoint(self.options.agent.address, self._socket)
        # Start importing now, so that the imports overlap with the work before the first turn.
        self.submit(self.run, bool, [None])
        return self

    def __exit__(self, *_: object) -> None:
        self.endpoint.close()
        self.close()

    def play(self, records: Sequence[PromptRecord]) -> list[list[int]]:
        """Start a session for each record, and return the sessions of each process in the order in which they start."""
        numbers = list(range(len(records)))
        urls = self.endpoint.open(numbers)
        size = math.ceil(len(records) / self.num_processes)
        shares = [numbers[i : i + size] for i in range(0, len(numbers), size)]
        control = self.endpoint.control_url
        sent = [Share(control, [(n, records[n], urls[n]) for n in share], self.at_once) for share in shares]
        self.submit(self._play, sent, self.endpoint.events)
        return shares

    def _play(self, shares: list[Share], events: SimpleQueue[Event]) -> None:
        """Run each process's sessions. If a process dies, its sessions end immediately."""

        def lost(index: int, error: BaseException) -> None:
            reason = failure_reason(error) or f"{type(error).__name__}: {error}"
            for number, _, _ in shares[index].sessions:
                events.put(Ended(number, 0.0, f"its process ended ({reason})"))  # no effect if it has ended before

        try:
            outcomes: list[Any] = self.run(_play_share, shares, lost)
        except Exception as error:  # reported as the end of every session
            outcomes = [error] * len(shares)
        for index, outcome in enumerate(outcomes):
            if isinstance(outcome, BaseException):
                lost(index, outcome)


def _socket_path() -> Path:
    """Return a new path for the endpoint's Unix socket, which is in /tmp if it would be too long elsewhere."""
    name = Path(f"verl-{secrets.token_hex(8)}/endpoint")
    path = Path(tempfile.gettempdir()) / name
    return path if len(os.fsencode(path)) <= MAX_SOCKET_BYTES else "/tmp" / name


# --- In the processes ---

_AGENT: list[tuple[Any, MultiTurnConfig, Path | None]] = []
"""The agent, the options, and the Unix socket of the endpoint, if the agent runs in the sandbox."""

_LOOP: list[asyncio.AbstractEventLoop] = []

_THREADS: list[threading.Thread] = []
"""Threads for agent functions that are not coroutines."""


def _prepare(options: MultiTurnConfig, socket: Path | None, log: Path | None) -> None:
    if log is not None:
        print_to(log, 1, 2)
    _AGENT[:] = [(load_agent(options.agent), options, socket)]


def _play_share(share: Share) -> None:
    """Run this process's share of the sessions, and report when each one starts and ends."""
    reports = SimpleQueue[Report]()
    running = set[int]()
    loop, room = _event_loop(share.at_once), asyncio.Semaphore(share.at_once)
    tasks: dict[int, Future[None]] = {}
    for number, record, url in share.sessions:
        coroutine = _play_session(room, running, reports, number, record, url)
        tasks[number] = asyncio.run_coroutine_threadsafe(coroutine, loop)
    left, deadlines = set(tasks), dict[int, float]()
    while left:
        new = drain(reports, EXCHANGE_S)
        closed = _report(share.control_url, new)
        closed = left if closed is None else closed & left
        for number in sorted(closed, reverse=True):  # sessions that still wait first: a freed slot must start none
            tasks[number].cancel()
            deadlines[number] = time.monotonic() + STOP_S
        left = left - closed - {number for number, reward, _ in new if reward is not None}
        # A closed session may block the loop, and only a new process can get rid of it.
        if any(number in running and time.monotonic() > deadline for number, deadline in deadlines.items()):
            os._exit(1)
    # A closed session may also block its thread.
    deadline = time.monotonic() + STOP_S
    while running or any(thread.is_alive() for thread in _THREADS):
        if time.monotonic() > deadline:
            os._exit(1)
        time.sleep(0.01)
    _THREADS.clear()


def _event_loop(at_once: int) -> asyncio.AbstractEventLoop:
    """Return this process's event loop. It outlives sessions, because clients in a user's module may do so too."""
    if not _LOOP:
        _LOOP.append(start_loop())
        # With asyncio's few default threads, agents that use threads would wait for each other and block the run.
        _LOOP[0].set_default_executor(ThreadPoolExecutor(THREADS_PER_SESSION * at_once))
    return _LOOP[0]


def _report(url: str, reports: list[Report]) -> set[int] | None:
    """Report started and ended sessions, and return the sessions to stop, or None to stop all."""
    body, headers = json.dumps(reports).encode(), {"Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60) as reply:
            return set(json.load(reply))
    except (OSError, ValueError):  # the run has ended, or samples the next step
        return None


async def _play_session(
    room: asyncio.Semaphore,
    running: set[int],
    reports: "SimpleQueue[Report]",
    number: int,
    record: PromptRecord,
    url: str,
) -> None:
    async with room:
        running.add(number)
        reports.put((number, None, ""))
        try:
            reward, failure = await _outcome(record, url), ""
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # an agent may raise anything, and costs its own episode
            traceback.print_exc()
            reward, failure = 0.0, f"{type(error).__name__}: {error}"[:500]
        finally:
            running.discard(number)
        reports.put((number, reward, failure))


async def _outcome(record: PromptRecord, url: str) -> float:
    """Run the agent once and return its reward, or 0 if it returns None."""
    ((agent, options, socket),) = _AGENT
    api_key = url.rsplit("/", 2)[-2]
    environment = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": api_key}
    if isinstance(agent, SandboxedAgent):
        assert socket is not None
        sandboxed = agent.start(environment, socket, options.memory_limit_mb << 20)
        returned = await _run_command(sandboxed, sandboxed.finish, record)
    elif options.agent.command is not None:
        process = _start_command(agent, environment)
        returned = await _run_command(process, process.wait, record)
    elif iscoroutinefunction(agent):
        returned = await agent(record, url, api_key)
    else:
        returned = await _in_thread(partial(agent, record, url, api_key))
    if returned is None:
        return 0.0
    reward = float(returned)
    if not math.isfinite(reward):
        raise ValueError(f"the agent returned the reward {reward}; expected None or a finite number")
    return reward


async def _in_thread(call: partial[Any]) -> Any:
    """Call a function in a daemon thread, which, unlike executor threads, cannot keep the process alive."""
    future = Future[Any]()
    future.set_running_or_notify_cancel()  # a session that is cancelled does not wait for it

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # raised by the coroutine
            failure = error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
            future.set_exception(failure)

    _THREADS.append(threading.Thread(target=run, daemon=True))
    _THREADS[-1].start()
    return await asyncio.wrap_future(future)


def _start_command(words: list[str], environment: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    pipe = subprocess.PIPE
    return subprocess.Popen(words, stdin=pipe, stdout=pipe, env=os.environ | environment, start_new_session=True)


async def _run_command(
    process: "subprocess.Popen[bytes]", finish: Callable[[], int], record: PromptRecord
) -> float | None:
    """Send a command the record on its standard input, and return the reward in its last output line, or None.

    Args:
        finish: Waits for the command's end and returns its exit code.
    """
    loop = asyncio.get_running_loop()
    if process.stderr is not None:
        loop.run_in_executor(None, _copy_errors, process)
    text, output = b"", loop.run_in_executor(None, _tail, process)
    fed = loop.run_in_executor(None, _feed, process, json.dumps(asdict(record), default=str).encode())
    try:
        code = await loop.run_in_executor(None, finish)
    finally:
        # Its child processes may keep the output open and outlive it.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    with suppress(TimeoutError):
        async with asyncio.timeout(STOP_S):
            await fed
            text = await output
    if code:
        raise RuntimeError(f"the command ended with code {code}")
    return read_reward(text.decode(errors="replace"))


def _feed(process: "subprocess.Popen[bytes]", record: bytes) -> None:
    assert process.stdin is not None
    with suppress(OSError), process.stdin:  # the command need not read it
        process.stdin.write(record)


def _copy_errors(process: "subprocess.Popen[bytes]") -> None:
    """Copy what a sandboxed command writes to standard error, whose file it must not be able to open."""
    assert process.stderr is not None
    left = MAX_ERROR_BYTES
    with process.stderr:
        while chunk := os.read(process.stderr.fileno(), MAX_OUTPUT_BYTES):
            if left > 0:
                os.write(2, chunk if len(chunk) < left else chunk[:left] + b"\n[further errors are dropped]\n")
            left -= len(chunk)


def _tail(process: "subprocess.Popen[bytes]") -> bytes:
    assert process.stdout is not None
    output = b""
    with process.stdout:
        while chunk := os.read(process.stdout.fileno(), MAX_OUTPUT_BYTES):
            output = (output + chunk)[-MAX_OUTPUT_BYTES:]
    return output


def read_reward(output: str) -> float | None:
    """Return the reward in the last line of a command's output, ``{"reward": 1.0}``, or None if there is none."""
    lines = output.strip().splitlines()
    with suppress(ValueError, RecursionError):
        last = json.loads(lines[-1]) if lines else None
        if isinstance(last, dict) and isinstance(last.get("reward"), int | float):
            return float(last["reward"])
    return None
