"""Pool of killable processes: what cannot be sent between processes costs its own task alone."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest

from verl.utils.process_pool import KillablePool, failure_reason


class TwoWordsError(Exception):
    """Pickled as one argument, and not readable with one."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


class SilentError(Exception):
    def __str__(self) -> str:
        raise KeyError("no text")


class PanicError(BaseException):
    """In place of a panic of a library written in Rust."""


class Unreadable:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[int]]:
        return _refuse, (1,)


def _refuse(_: int) -> None:
    raise RecursionError("too deep")


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


def work(task: Any) -> Any:
    if task == "nest":
        return nested(100_000)
    if task == "lambda":
        return lambda: None
    if task == "unreadable":
        return Unreadable()
    if task == "two words":
        raise TwoWordsError("a", "b")
    if task == "silent":
        raise SilentError
    if task == "panic":
        raise PanicError("index out of bounds")
    if task == "interrupt":
        raise KeyboardInterrupt
    return "done"


def prepare() -> None:
    """Prepare nothing."""


@pytest.mark.slow
def test_unsendable_values_cost_their_task_alone() -> None:
    hostile = [nested(100_000), lambda: None, Unreadable(), b"x" * (65 << 20), "nest", "lambda", "unreadable"]
    raising = ["two words", "silent", "panic", "interrupt"]
    pool = KillablePool("test process", "group", 1, 20.0, 256, prepare, users_code=False)
    try:
        outcomes = pool.submit(pool.run, work, [*hostile, *raising, "fine"]).result()
    finally:
        pool.close()
    assert outcomes[-1] == "done"
    reasons = [failure_reason(outcome) for outcome in outcomes[:-1]]
    assert reasons == [*["crash"] * 3, "memory", *["crash"] * 3, *[None] * 4]
    two_words, silent, panic, interrupt = outcomes[len(hostile) : -1]
    assert str(two_words).startswith("raised TwoWordsError: a b (") and "test_process_pool.py, line" in str(two_words)
    assert (type(silent), type(panic), type(interrupt)) == (SilentError, PanicError, KeyboardInterrupt)
    assert pickle.loads(pickle.dumps(outcomes[0])).args == outcomes[0].args
