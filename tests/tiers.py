"""Which tests run: all but the nightly ones, or with ``--quick`` those marked neither slow, nightly nor gpu.

In the quick tier a test that starts a process, Ray's included, or imports vLLM fails and is told which mark it needs.
"""

import _posixsubprocess
import platform
import sys
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


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.option.quick:
        config.option.markexpr = "not (slow or nightly or gpu)"
        config.option.timeout = TIME_LIMIT
        # With pytest -n, this process only starts those that run the tests.
        if not getattr(config.option, "numprocesses", None):
            forbid_processes()


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


def forbid_processes() -> None:
    """Let every test of this process fail that starts another one or imports vLLM."""

    def refuse(what: str) -> None:
        # pytest.fail raises no Exception, which the code under test might catch.
        pytest.fail(f"{what} in the quick tier: mark this test slow, or list its module in {__name__}.NEED_VLLM")

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event in PROCESS_STARTS:
            refuse(f"{event}{arguments[:2]}")
        if event == "import" and arguments[0] == "vllm":
            refuse("import vllm")

    platform.processor()  # asks a process once, and remembers the answer for libraries that ask again
    sys.addaudithook(audit)
    # multiprocessing's way to spawn has no audit event.
    _posixsubprocess.fork_exec = lambda *_: refuse("multiprocessing")
