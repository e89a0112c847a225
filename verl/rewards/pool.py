"""Verifiers in processes that can be killed, so that no response can hang the trainer or exhaust its memory.

A batch gets quick verdicts first, with many responses per message: most answers are equal or different as text or as
numbers. Answers that need algebra are then verified one per message, each under its own time limit.
"""

import ctypes
import logging
import multiprocessing
import os
import resource
import secrets
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Self

import psutil
from pebble import ProcessExpired, ProcessPool

from verl.config.checks import require
from verl.config.rewards import RewardScoreConfig
from verl.rewards.answers import THINK, after_thinking, extract_boxed
from verl.rewards.custom import CustomFunctionError, load_function
from verl.rewards.registry import Job, compute_score, find_scorer, use_custom_functions
from verl.rewards.score import Score, Verdict, score_of
from verl.rewards.stragglers import kill_stragglers, mark_process
from verl.rewards.truths import require_shallow
from verl.utils.process import available_cores, restore_umask

logger = logging.getLogger(__name__)

CHUNK_SIZE = 32
"""Responses in one message of the quick pass."""

STALL_S = 120.0
"""The pool is restarted after this many seconds beyond the time limit without progress; more than a worker takes to
start on a loaded machine."""

FAILURES = {
    TimeoutError: "timeout",
    MemoryError: "memory",
    RecursionError: "crash",
    ProcessExpired: "crash",
}
"""What ends the verification of a response without a verdict -> the reason that its verdict gets."""

ENDED = (TimeoutError, ProcessExpired)
"""What a future has whose process was killed or died."""

MOST_PROCESSES = 32
"""Verifier processes that are started unasked; each takes some 200 MB."""

MAX_STARTS = 3
"""Starts of the pool within one batch before giving up."""

PR_SET_PDEATHSIG = 1
"""Linux ``prctl`` option: the signal that this process gets when the thread that started it ends."""

WARM_UP = ("math", r"\boxed{x^2+2x+1}", "(x+1)^2")
"""Scored before the first response, so that its time limit does not include imports and the filling of sympy's
caches."""


def spare_cores(busy: int) -> int:
    """Verifier processes for a machine on which others keep ``busy`` of this process's cores."""
    return min(MOST_PROCESSES, max(1, available_cores() - busy))


PendingScores = Future[list[Score]]
"""The scores of a submitted batch, in the order of its responses.

``result`` waits for them. It raises what a verifier raised, or ``RuntimeError`` if the pool was closed.
"""


class VerifierPool:
    """A context manager of verifier processes: ``config.num_workers``, or what :func:`spare_cores` leaves for them.

    A response whose verifier exceeds ``timeout_s`` or its memory, or dies, counts as wrong with the reason
    ``timeout``, ``memory`` or ``crash``; other responses are not affected. ``memory_limit_mb`` bounds the memory of a
    process beyond its size after imports. Any other exception of a verifier is a bug in it and is raised.

    ``config.custom_functions`` are a user's own functions and come before the verifiers; a response on which one of
    them runs out of time or memory or dies scores 0, and processes that it started end with it. So does one on which it
    raises with ``on_function_error=zero``, with the reason ``error``; the first of these is shown. Raises
    ``ConfigError`` if one cannot be loaded.

    The processes are spawned, not forked, because this process holds threads and accelerators. They end with it even if
    it is killed. One pool may be used from several threads; its batches are scored one after another.
    """

    def __init__(self, config: RewardScoreConfig, busy_cores: int = 1) -> None:
        """``busy_cores``: cores of this machine that others compute on meanwhile."""
        self.config = config
        self.num_processes = config.num_workers or spare_cores(busy_cores)
        self._custom = config.paths_of_custom_functions()
        for path in self._custom.values():
            load_function(path, tuple(config.custom_kwargs))
        self._closed = False
        self._warned = False
        self._processes: ProcessPool | None = None
        self._mark = f"verl-{secrets.token_hex(8)}"
        self._started = set[int]()
        """Process ids of all verifier processes there were."""
        self._dispatcher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="verifier-pool")

    def __enter__(self) -> Self:
        # Starts the processes now, so that their imports overlap with the work before the first batch.
        self._dispatcher.submit(self._run, _verify_quickly, [[]])
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def score_batch(
        self,
        data_sources: Sequence[str],
        solutions: Sequence[str],
        ground_truths: Sequence[Any],
        extra_infos: Sequence[Mapping[str, Any] | None] | None = None,
        in_thought: Sequence[bool] | None = None,
    ) -> list[Score]:
        """The scores of a batch, by ``config.mode``; see ``submit_batch``."""
        return self.submit_batch(data_sources, solutions, ground_truths, extra_infos, in_thought).result()

    def submit_batch(
        self,
        data_sources: Sequence[str],
        solutions: Sequence[str],
        ground_truths: Sequence[Any],
        extra_infos: Sequence[Mapping[str, Any] | None] | None = None,
        in_thought: Sequence[bool] | None = None,
        takes_hashes: Sequence[bool] | None = None,
    ) -> PendingScores:
        """Start scoring a batch: for each response its data source, text, ground truth and extra information.

        ``in_thought`` says which responses begin in a thought that their prompt opened: without ``</think>`` they have
        no answer. A custom function gets the response alone. ``takes_hashes``: as of :class:`Job`, for each response.

        Returns immediately. Raises ``ValueError`` for an unknown data source, a ground truth that its verifier cannot
        compare with, values too deep to be sent, or sequences of unequal length; ``RuntimeError`` if the pool is
        closed.
        """
        infos = [None] * len(solutions) if extra_infos is None else extra_infos
        opened = [False] * len(solutions) if in_thought is None else in_thought
        hashes = [False] * len(solutions) if takes_hashes is None else takes_hashes
        lengths = [len(data_sources), len(solutions), len(ground_truths), len(infos), len(opened), len(hashes)]
        require(len(set(lengths)) == 1, "batch", lengths, "needs one entry of each kind per response")
        self._check_open()
        scorers = {source: find_scorer(source, self._custom) for source in set(data_sources)}
        jobs = []
        for source, solution, truth, info, thinks, in_hashes in zip(
            data_sources, solutions, ground_truths, infos, opened, hashes, strict=True
        ):
            text = THINK + solution if thinks and not scorers[source].is_custom else solution
            jobs.append(Job(scorers[source], source, text, truth, info, in_hashes))
        # Responses to one prompt share these values.
        for job in {(id(job.ground_truth), id(job.extra_info)): job for job in jobs}.values():
            require_shallow(job.ground_truth, "ground_truth")
            require_shallow(job.extra_info, "extra_info")
            job.scorer.accepted(job.ground_truth)
        return self._dispatcher.submit(self._score, jobs)

    def close(self) -> None:
        """Stop the verifier processes, even in the middle of a batch. May be called twice."""
        if not self._closed:
            self._closed = True
            # The processes end with the dispatching thread, which started them, so that thread has to stop them.
            self._dispatcher.submit(self._stop_processes)
            self._dispatcher.shutdown(wait=True)

    def _score(self, jobs: list[Job]) -> list[Score]:
        chunks = [jobs[i : i + CHUNK_SIZE] for i in range(0, len(jobs), CHUNK_SIZE)]
        verdicts: list[Verdict | None] = []
        for chunk, quick in zip(chunks, self._run(_verify_quickly, chunks), strict=True):
            # The responses of a failed chunk stay undecided and are verified one by one below.
            verdicts += [None] * len(chunk) if isinstance(quick, BaseException) else quick
        undecided = [index for index, verdict in enumerate(verdicts) if verdict is None]
        outcomes = self._run(Job.verdict, [jobs[index] for index in undecided])
        for index, outcome in zip(undecided, outcomes, strict=True):
            verdicts[index] = self._failure(outcome, jobs[index]) if isinstance(outcome, BaseException) else outcome
        assert None not in verdicts
        return [score_of(verdict, self.config.mode) for verdict in verdicts if verdict is not None]

    def _failure(self, error: BaseException, job: Job) -> Verdict:
        """The verdict on a response whose verifier failed because of it; raises any other ``error``."""
        reason = next((reason for kind, reason in FAILURES.items() if isinstance(error, kind)), None)
        if isinstance(error, CustomFunctionError) and self.config.on_function_error == "zero":
            reason = "error"
            if not self._warned:
                self._warned = True
                logger.warning("%s; its score is 0, as of all that follow (verifier/error counts them)", error)
        if reason is None and isinstance(error, Exception):
            raise error
        if reason is None:  # KeyboardInterrupt or SystemExit would end this process as if the user had asked for it
            raise RuntimeError(f"the verifier of {job.data_source!r} raised {type(error).__name__}") from error
        boxed = extract_boxed(after_thinking(job.solution)) is not None
        return Verdict(False, boxed, reason, score=0.0 if job.scorer.is_custom else None)

    def _run(self, function: Callable[[Any], Any], arguments: Sequence[Any]) -> list[Any]:
        """The function's result for each argument, or the exception that ended it, from the verifier processes."""
        outcomes: list[Any] = [None] * len(arguments)
        unfinished = list(range(len(arguments)))
        for _ in range(MAX_STARTS):
            if not unfinished:
                return outcomes
            self._check_open()
            processes = self._running_processes()
            futures = {
                processes.schedule(function, args=(arguments[i],), timeout=self.config.timeout_s): i for i in unfinished
            }
            self._wait(list(futures))
            unfinished = []
            for future, index in futures.items():
                if not future.done() or isinstance(future.exception(), BrokenProcessPool):
                    unfinished.append(index)
                else:
                    outcomes[index] = future.exception() or future.result()
            if unfinished:
                logger.warning("verifier processes lost %d responses; restarting the processes", len(unfinished))
                self._stop_processes()
        if unfinished:
            raise RuntimeError(
                f"reward_score.num_workers={self.num_processes}: verifier processes stopped {MAX_STARTS} times "
                f"without a result; see their errors above, or raise reward_score.memory_limit_mb"
            )
        return outcomes

    def _wait(self, futures: list[Future[Any]]) -> None:
        """Return when all are done, or after too long without progress: if a process dies while it holds the pool's
        lock, the others wait for the lock forever."""
        progress, num_done, lost = time.monotonic(), 0, 0
        while True:
            self._started |= {process.pid for process in multiprocessing.active_children() if process.pid}
            done, pending = wait(futures, timeout=0.5)
            ended = sum(not future.cancelled() and isinstance(future.exception(), ENDED) for future in done)
            if ended > lost:
                lost = ended
                self._kill_stragglers()
            if not pending:
                return
            self._check_open()
            if len(done) > num_done:
                progress, num_done = time.monotonic(), len(done)
            if time.monotonic() - progress > self.config.timeout_s + STALL_S:
                return

    def _kill_stragglers(self) -> None:
        """End what a user's function started and left behind; other verifiers start no processes."""
        if self._custom:
            kill_stragglers(self._mark, self._started)
            # A number is given again, perhaps to a session of the user's own, once no process of its session is left.
            self._started &= {process.pid for process in multiprocessing.active_children() if process.pid}

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the verifier pool is closed; collect scores inside its with block")

    def _running_processes(self) -> ProcessPool:
        if self._processes is not None and not self._processes.active:
            self._stop_processes()
        if self._processes is None:
            # Not a fork server: it lives as long as its children, so a hanging child would keep both alive forever.
            self._processes = ProcessPool(
                max_workers=self.num_processes,
                initializer=_prepare_process,
                initargs=(self.config.memory_limit_mb, self._custom, self.config.custom_kwargs, self._mark),
                context=multiprocessing.get_context("spawn"),
            )
        return self._processes

    def _stop_processes(self) -> None:
        if self._processes is not None:
            self._processes.stop()  # type: ignore[no-untyped-call]  # pebble leaves it untyped
            self._processes.join()
            self._processes = None
            self._kill_stragglers()


def _prepare_process(memory_limit_mb: int, custom: Mapping[str, str], kwargs: Mapping[str, Any], mark: str) -> None:
    """Runs first in every verifier process."""
    restore_umask()
    mark_process(mark)
    # A process inside a long C call (an integer power) never reaches a Python signal handler; the default action ends
    # it.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    compute_score(*WARM_UP)
    use_custom_functions(custom, kwargs)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        # Otherwise nothing would end a hanging process whose parent was killed.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        parent = multiprocessing.parent_process()
        if parent is None or not parent.is_alive():
            os._exit(1)
        limit = psutil.Process().memory_info().vms + memory_limit_mb * 2**20
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _verify_quickly(jobs: list[Job]) -> list[Verdict | None]:
    """Runs in a verifier process."""
    return [job.verdict(quick=True) for job in jobs]
