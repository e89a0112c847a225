"""An event loop and a queue that live beside a process's main thread. Importing this module is fast."""

import asyncio
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TypeVar

Entry = TypeVar("Entry")


def start_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop that runs in a daemon thread until the process ends."""
    loop = asyncio.new_event_loop()
    Thread(target=_run, args=[loop], daemon=True).start()
    return loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    while True:
        # KeyboardInterrupt and SystemExit in a task that a user's code has started stop the loop of all tasks.
        with suppress(BaseException):
            loop.run_forever()


def drain(queue: SimpleQueue[Entry], wait_s: float = 0.0) -> list[Entry]:
    """Return everything in a queue, after waiting at most ``wait_s`` seconds for the first entry."""
    found: list[Entry] = []
    with suppress(Empty):
        if wait_s > 0:
            found.append(queue.get(timeout=wait_s))
        while True:
            found.append(queue.get_nowait())
    return found
