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

NEED_VLLM = ("vllm_patches", "rollout/test_weight_sync.py")
"""Tests below this folder whose modules import vLLM, which takes seconds: the quick tier does not load them."""

STARTS_PROCESS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.exec", "os.system"}
"""Python's audit events of a process that starts."""

TIME_LIMIT = 60
"""Seconds of a quick test: several times what the slowest needs on a quiet machine."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="only tests that start no process, Ray or vLLM")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.option.quick:
        config.option.markexpr = "not (slow or nightly or gpu)"
        config.option.timeout = TIME_LIMIT
        # The process that hands tests out to others must start those.
        if not getattr(config.option, "numprocesses", None):
            forbid_processes()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if config.option.quick and collection_path in (TESTS / place for place in NEED_VLLM) else None


def pytest_report_header(config: pytest.Config) -> str | None:
    return f"quick: no processes, no Ray, no vLLM; not loaded: {', '.join(NEED_VLLM)}" if config.option.quick else None


def forbid_processes() -> None:
    """From now on nothing starts a process or imports vLLM in this one."""

    def refuse(what: str) -> None:
        # No Exception, which the code under test might catch.
        pytest.fail(f"{what} in the quick tier: mark this test slow, or list its module in {__name__}.NEED_VLLM")

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event in STARTS_PROCESS:
            refuse(f"{event}{arguments[:2]}")
        if event == "import" and arguments[0] == "vllm":
            refuse("import vllm")

    platform.processor()  # asks a process, and keeps the answer for the libraries that ask again
    sys.addaudithook(audit)
    # multiprocessing's way to spawn has no audit event.
    _posixsubprocess.fork_exec = lambda *_: refuse("multiprocessing")
