"""Runs custom reward functions that are coroutines, with many concurrent calls, retries and a cache.

All calls run in one event loop in a separate process, which is killed if a call blocks the loop.
"""

import asyncio
import hashlib
import inspect
import json
import os
import random
import signal
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple

from verl.config.errors import ConfigError
from verl.config.rewards import AsyncFunctionsConfig
from verl.rewards.custom import CUSTOM_KWARGS, CustomFunctionError, awaited_verdict, keywords_of, load_function
from verl.utils.user_code import source_file
from verl.verifiers.verdict import Verdict

MAX_CALLS = 1024
"""Maximum number of responses in a message to the service process."""

LONGEST_PAUSE_S = 30.0
"""Maximum pause in seconds before a retry. The pause doubles with each failure, starting at half a second."""

GRACE_S = 60.0
"""Additional time in seconds that a message may take, to allow for imports and slow machines."""

BLOCKED_S = 5.0
"""Seconds beyond a call's time limit for which the event loop may be blocked before the process is killed."""

Question = tuple[Any, ...]
"""Function path, data source, response, ground truth, extra information, and whether the function is part of a sum."""


class Message(NamedTuple):
    """Questions to answer together."""

    questions: Sequence[Question]
    options: AsyncFunctionsConfig
    cache: Path | None
    """File with cached answers, or None to disable the cache."""


def message_limit_s(options: AsyncFunctionsConfig) -> float:
    """Return the time limit in seconds for all calls of a message together."""
    pauses = options.max_retries * LONGEST_PAUSE_S
    return GRACE_S + MAX_CALLS / options.max_in_flight * (options.timeout_s * (options.max_retries + 1) + pauses)


def answer(message: Message) -> list[Verdict | str]:
    """Return the verdict on each question, or a one-line reason why there is no verdict.

    The ``extras`` of each verdict contain the number of calls (``calls``) and whether the answer came from the cache
    (``from_cache``). Identical questions are asked only once.
    """
    with closing(_Answers(message.cache)) as answers:
        return asyncio.run(_gather(message, answers))


async def _gather(message: Message, answers: "_Answers") -> list[Verdict | str]:
    ended, limit = Event(), message.options.timeout_s + BLOCKED_S
    Thread(target=_kill_if_blocked, args=(asyncio.get_running_loop(), limit, ended), daemon=True).start()
    try:
        free = asyncio.Semaphore(message.options.max_in_flight)
        keys = [question_key(question) for question in message.questions]
        asked = dict(zip(keys, message.questions, strict=True))
        tasks = [_ask(key, question, message.options, free, answers) for key, question in asked.items()]
        found = dict(zip(asked, await asyncio.gather(*tasks), strict=True))
    finally:
        ended.set()
    return [found[key] for key in keys]


def _kill_if_blocked(loop: asyncio.AbstractEventLoop, limit_s: float, ended: Event) -> None:
    """Kill this process if a call such as ``time.sleep`` blocks the loop for ``limit_s`` seconds."""
    while not ended.wait(1.0):
        ran = Event()
        loop.call_soon_threadsafe(ran.set)
        if not ran.wait(limit_s) and not ended.is_set():
            os.kill(os.getpid(), signal.SIGKILL)


async def _ask(
    key: str, question: Question, options: AsyncFunctionsConfig, free: asyncio.Semaphore, answers: "_Answers"
) -> Verdict | str:
    known = answers.find(key)
    if known is not None:
        return _with_extras(known, calls=0, from_cache=True)
    failure = ""
    for attempt in range(options.max_retries + 1):
        if attempt:
            # Randomize the pause, so that calls that failed together are not retried together.
            await asyncio.sleep(min(LONGEST_PAUSE_S, 0.5 * 2 ** (attempt - 1)) * random.uniform(0.5, 1.0))
        try:
            async with free:
                called = awaited_verdict(*question[:5], is_part=question[5])
                verdict = await asyncio.wait_for(called, options.timeout_s)
        except TimeoutError:
            failure = f"{question[0]} on data_source={question[1]!r} took longer than {options.timeout_s:g} s"
        except (CustomFunctionError, MemoryError, RecursionError) as error:
            failure = str(error) or type(error).__name__
        else:
            answers.keep(key, verdict)
            return _with_extras(verdict, calls=attempt + 1, from_cache=False)
    times = f"; {options.max_retries + 1} calls failed" if options.max_retries else ""
    return f"{failure}{times}"


def _with_extras(verdict: Verdict, **extras: Any) -> Verdict:
    return Verdict(**vars(verdict) | {"extras": extras | dict(verdict.extras)})


def _source(path: str) -> Path:
    """Return a function's source file, or the file of the module in ``path`` if the object is not a plain function."""
    function = inspect.unwrap(load_function(path))
    file = inspect.getsourcefile(function) if inspect.isfunction(function) else source_file(path)
    return Path(file or "")


def question_key(question: Question) -> str:
    """Return a digest of everything that an answer depends on, including the function's source code."""
    path, file = question[0], _source(question[0])
    code = file.read_text(errors="replace") if file.is_file() else ""
    text = json.dumps([code, keywords_of(path, CUSTOM_KWARGS), *question], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=20).hexdigest()


class _Answers:
    """Database of answers, keyed by the question's digest, that survives if a process is killed.

    If the file is damaged, for example by a machine crash, its readable answers are moved to a new file. Raises
    ``ConfigError`` if the file is not a database, or cannot be written.
    """

    def __init__(self, file: Path | None) -> None:
        self.file = file
        self._database: sqlite3.Connection | None = None
        if file is not None:
            self._open(file)

    def _open(self, file: Path) -> None:
        try:
            self._database = sqlite3.connect(file, timeout=60, isolation_level=None)
            # Files may be on a network, where WAL does not work. Without waiting for the disk, answers survive the
            # death of this process, not that of the machine.
        except sqlite3.Error as error:
            raise self._unusable(error) from error
        self._run("PRAGMA synchronous=OFF")
        self._run("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, verdict TEXT)")

    def find(self, key: str) -> Verdict | None:
        """Return the stored verdict on a question, or None if it is missing or damaged."""
        rows = self._run("SELECT verdict FROM answers WHERE key = ?", key)
        try:
            saved = json.loads(rows[0][0]) if rows else None
            return Verdict.from_dict(saved) if isinstance(saved, Mapping) else None
        except (ValueError, KeyError, TypeError, RecursionError):
            return None

    def keep(self, key: str, verdict: Verdict) -> None:
        """Store an answer immediately, so that it is not requested again if the process is killed."""
        text = json.dumps(verdict.as_dict() | {"stated": verdict.stated})
        self._run("INSERT OR REPLACE INTO answers VALUES (?, ?)", key, text)

    def close(self) -> None:
        if self._database is not None:
            self._database.close()

    def _run(self, statement: str, *values: str, is_repeated: bool = False) -> list[Any]:
        """Execute a statement and return its rows. Without a cache, the result is empty."""
        if self._database is None:
            return []
        try:
            return self._database.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            if is_repeated or "malformed" not in str(error):
                raise self._unusable(error) from error
        self._salvage()
        return self._run(statement, *values, is_repeated=True)

    def _salvage(self) -> None:
        """Move the readable answers of a damaged file to a new file."""
        assert self.file is not None and self._database is not None
        found: dict[Any, Any] = {}
        with suppress(sqlite3.Error):
            self._database.execute("PRAGMA writable_schema=ON")  # read a file that is shorter than it should be
        for order in ("ASC", "DESC"):  # reading ends at a damaged page, from either side
            with suppress(sqlite3.Error):
                found |= self._database.execute(f"SELECT key, verdict FROM answers NOT INDEXED ORDER BY rowid {order}")
        self._database.close()
        self.file.replace(self.file.with_suffix(".damaged"))
        self._open(self.file)
        # The record in which the file ends is filled up with zeros.
        whole = {k: v for k, v in found.items() if k and v and "\0" not in f"{k}{v}"}
        for key, verdict in whole.items():
            self._run("INSERT OR REPLACE INTO answers VALUES (?, ?)", key, verdict)

    def _unusable(self, error: sqlite3.Error) -> ConfigError:
        return ConfigError(f"{self.file}: answers of reward functions cannot be kept there: {error}; move it away")
