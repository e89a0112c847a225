"""Verifier for reasoning-gym problems, which calls the scorer of the problem's generator.

The ground truth contains the generator's name, its options (for scorers that read them), and the whole problem. The
problem is a Python literal, because JSON has no tuples. Some scorers evaluate the answer as Python code, so operations
with effects outside the process are blocked during scoring.
"""

import ast
import json
import math
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cache
from typing import Any

from verl.config.errors import ConfigError
from verl.verifiers.answers import TAIL_CHARS, extract_boxed, extract_tagged
from verl.verifiers.verdict import Info, Verdict

KEYS = ("answer", "dataset", "options", "problem")
"""Keys of a ground truth."""

REFUSED = ("os.", "shutil.", "subprocess.", "socket.", "ctypes.", "pty.", "signal.", "fcntl.", "mmap.", "tempfile.")
"""Prefixes of audit events that are blocked during scoring."""
ALLOWED = ("os.listdir", "os.scandir", "os.walk")
"""Audit events that are allowed despite their prefix, because imports depend on them."""

_SCORING = threading.local()


def verify_reasoning_gym(
    solution: str, ground_truth: Any, extra_info: Info = None, quick: bool = False
) -> Verdict | None:
    """Verify a response. Return None if ``quick`` is set and an answer must be scored. ``extra_info`` is unused.

    The answer is the content of the last ``<answer>``, or else of the last box, or else the whole response if it is
    short. The generator's scorer computes the score, which is at least 1 for correct responses, and 0 if the scorer
    fails.
    """
    (truth,) = read_truth(ground_truth)
    marked = extract_tagged(solution, "answer") or extract_boxed(solution)
    answer = marked or (solution.strip() if len(solution) <= TAIL_CHARS else "")
    if not answer:
        return Verdict(False, False, "missing", score=0.0)
    if quick:
        return None
    dataset = load_generator(truth["dataset"], json.dumps(truth["options"], sort_keys=True))
    problem = ast.literal_eval(truth["problem"])
    try:
        with confined():
            score = float(dataset.score_answer(answer, problem))
    except (MemoryError, RecursionError, KeyboardInterrupt):
        raise
    except BaseException:  # an answer that is evaluated may raise anything, such as SystemExit
        return Verdict(False, marked is not None, "unparsed", answer, score=0.0)
    score = score if math.isfinite(score) else 0.0
    return Verdict(score >= 1, marked is not None, "equivalent" if score >= 1 else "different", answer, score=score)


def read_truth(truth: Any) -> list[Any]:
    """Parse a ground truth given as a mapping or as JSON text. Raises ``ValueError`` if one of ``KEYS`` is missing."""
    truth = json.loads(truth) if isinstance(truth, str) else truth
    if not isinstance(truth, Mapping) or not all(key in truth for key in KEYS):
        raise ValueError(f"{truth!r:.80}: must be a problem of reasoning-gym, with {', '.join(KEYS)}")
    return [truth]


@cache
def load_generator(name: str, options: str) -> Any:
    """Create the reasoning-gym generator ``name`` with ``options``, a mapping as JSON.

    Raises ``ConfigError`` if reasoning-gym is not installed, has no such generator, or rejects the options.
    """
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ConfigError(f"reasoning_gym/{name}: {error}; `pip install reasoning-gym`") from error
    if name not in DATASETS:
        near = get_close_matches(name, DATASETS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "its GALLERY.md lists them"
        raise ConfigError(f"reasoning_gym/{name}: reasoning-gym has no generator {name!r}; {hint}")
    try:
        return reasoning_gym.create_dataset(name, **json.loads(options))
    except Exception as error:  # generators check their options with assertions, or fail on them later
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ConfigError(f"reasoning_gym/{name}: reasoning-gym refuses {options}: {reason}") from error


@contextmanager
def confined() -> Iterator[None]:
    """Block file writes, subprocesses, signals and network connections in this thread.

    This prevents accidental side effects of evaluated answers, but is not a sandbox for malicious code.
    """
    _install_hook()
    _SCORING.active = True
    try:
        yield
    finally:
        _SCORING.active = False


@cache
def _install_hook() -> None:
    sys.addaudithook(_audit)


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not getattr(_SCORING, "active", False):
        return
    if event == "open":
        _, mode, flags = arguments
        writes = {*"wax+"} & {*(mode or "")} or (flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    else:
        writes = event.startswith(REFUSED) and event not in ALLOWED
    if writes:
        raise PermissionError(f"an answer must not use {event}")
