"""What holds for every test that starts processes."""

import signal
from collections.abc import Iterator

import pytest

from tests.e2e.runs import STARTED


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """Let Ctrl-C interrupt what the tests start: a shell that runs them in the background has them ignore it, and their
    children would inherit that."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def nothing_outlives_its_test() -> Iterator[None]:
    """Kill what a failed test left running: the next ones would be slowed by it."""
    yield
    while STARTED:
        STARTED.pop().kill()
