"""Which tests run: all but the nightly ones, or with ``--quick`` those marked neither slow, nightly nor gpu.

In every tier, a test without these marks fails if it starts a process, Ray's included, or imports vLLM.
"""

import _posixsubprocess
import platform
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent

NEED_VLLM = (
    "vllm_patches",
    "rollout/test_weight_sync.py",
    "rollout/test_architectures.py",
    "rollout/test_rollouts.py",
    "rollout/environments/test_tool_parser.py",
    "trainer/ppo/test_weight_check.py",
    "test_benchmarks.py",
)
"""Tests below this folder whose modules import vLLM, which takes seconds: the quick tier does not load them."""

PROCESS_STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.exec", "os.system"}
"""Python's audit events of a process that starts."""

TIME_LIMIT = 60
"""Seconds that a quick test may take: ten times what the slowest needs on a quiet machine."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="only tests that start no process, Ray or vLLM")


_quick = False
"""Whether a quick test runs, or in the quick tier its files are collected."""


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    global _quick
    if config.option.quick:
        config.option.markexpr = "not (slow or nightly or gpu)"
        config.option.timeout = TIME_LIMIT
    # With pytest -n, this process only starts those that run the tests.
    if not getattr(config.option, "numprocesses", None):
        _quick = config.option.quick
        watch_processes()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Hold quick tests to their rule in every tier."""
    global _quick
    before = _quick
    marked = any(item.get_closest_marker(mark) for mark in ("slow", "nightly", "gpu"))
    _quick = before or not (marked or needs_vllm(item.path))
    try:
        return (yield)
    finally:
        _quick = before


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "ray_session" in getattr(item, "fixturenames", ()):
            item.add_marker("slow")
    # Files with slow tests first: with pytest -n, the quick ones then fill what is left of the time of each process.
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow and not needs_vllm(item.path))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if config.option.quick and needs_vllm(collection_path) else None


def needs_vllm(path: Path) -> bool:
    """Whether a test's file is in ``NEED_VLLM``."""
    return any(path.is_relative_to(TESTS / place) for place in NEED_VLLM)


def pytest_report_header(config: pytest.Config) -> str | None:
    return f"quick: no processes, no Ray, no vLLM; not loaded: {', '.join(NEED_VLLM)}" if config.option.quick else None


def watch_processes() -> None:
    """Let a quick test fail that starts a process, other than git, or imports vLLM."""

    def refuse(what: str) -> None:
        if _quick:
            # pytest.fail raises no Exception, which the code under test might catch.
            pytest.fail(f"{what} in a quick test: mark it slow, or list its module in {__name__}.NEED_VLLM")

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event in PROCESS_STARTS and arguments[:1] != ("git",):
            refuse(f"{event}{arguments[:2]}")
        if event == "import" and arguments[0] == "vllm":
            refuse("import vllm")

    def spawn(*arguments: Any) -> int:
        refuse("multiprocessing")
        return start(*arguments)

    platform.processor()  # asks a process once, and remembers the answer for libraries that ask again
    sys.addaudithook(audit)
    # multiprocessing's way to start a process has no audit event; subprocess holds the function itself.
    start, _posixsubprocess.fork_exec = _posixsubprocess.fork_exec, spawn
