"""Helpers for an event loop and a queue in background threads. Importing this module is fast."""

import asyncio
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TypeVar

Entry = TypeVar("Entry")


def start_loop() -> asyncio.AbstractEventLoop:
    """Start an event loop in a daemon thread, where it runs until the process ends, and return the loop."""
    loop = asyncio.new_event_loop()
    Thread(target=_run, args=[loop], daemon=True).start()
    return loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    while True:
        # KeyboardInterrupt and SystemExit in a task of a user's code would stop the loop for all tasks.
        with suppress(BaseException):
            loop.run_forever()


def drain(queue: SimpleQueue[Entry], wait_s: float = 0.0) -> list[Entry]:
    """Return all entries of a queue, waiting at most ``wait_s`` seconds for the first one."""
    found: list[Entry] = []
    with suppress(Empty):
        if wait_s > 0:
            found.append(queue.get(timeout=wait_s))
        while True:
            found.append(queue.get_nowait())
    return found
