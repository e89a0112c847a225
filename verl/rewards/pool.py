"""Pool of killable verifier processes, so that no response can hang the trainer or exhaust its memory.

A batch is first verified in a quick pass with many responses per message, because most answers can be compared as text
or numbers. Answers that need algebra are then verified in separate messages, each with its own time limit.
"""

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from verl.config.checks import require
from verl.config.judge import JUDGE
from verl.config.rewards import VERIFIER, RewardScoreConfig, is_sum, summands
from verl.rewards.combined import INAPPLICABLE, add_verdicts
from verl.rewards.custom import CustomFunctionError, check_function, is_async, none_applies, plain_extras
from verl.rewards.registry import ZERO_IF_FAILED, Job, Scorer, compute_score, find_scorer, use_custom_functions
from verl.rewards.score import with_score
from verl.rewards.services import MAX_CALLS, Message, answer, message_limit_s
from verl.utils.process_pool import KillablePool, failure_reason, spare_cores
from verl.verifiers.answers import THINK, after_thinking, extract_boxed
from verl.verifiers.ground_truths import require_shallow
from verl.verifiers.verdict import Verdict

logger = logging.getLogger(__name__)

ANSWERS = "reward_answers.sqlite"
"""File in a run's folder that caches the results of custom functions that are coroutines."""

CHUNK_SIZE = 32
"""Number of responses per message in the quick pass."""

WARM_UP = ("math", r"\boxed{x^2+2x+1}", "(x+1)^2")
"""Example scored at startup, so that imports and sympy's cold caches do not count towards the first time limit."""

PendingVerdicts = Future[list[Verdict]]
"""Future for the scored verdicts on a submitted batch, in the order of the responses.

``result`` re-raises a verifier's exception and raises ``RuntimeError`` if the pool was closed.
"""


class VerifierPool(KillablePool):
    """Context manager for a pool of ``config.num_workers`` verifier processes (default: :func:`spare_cores`).

    If a verifier exceeds ``timeout_s`` or its memory limit, or dies, the response counts as wrong, with the reason
    ``timeout``, ``memory`` or ``crash``. Other responses are not affected. ``memory_limit_mb`` is relative to the
    process size after imports. Any other exception from a verifier indicates a bug and is raised.

    ``config.custom_functions`` take precedence over verifiers. If a custom function exceeds a limit or dies, the
    response scores 0 and the function's child processes are killed. With ``on_function_error=zero``, a response also
    scores 0, with the reason ``error``, if the function raises an exception. Only the first exception is logged. Raises
    ``ConfigError`` if a function cannot be loaded. A pool is thread-safe; batches are scored one at a time.
    """

    def __init__(self, config: RewardScoreConfig, busy_cores: int = 1, folder: Path | None = None) -> None:
        """Create a pool.

        Args:
            busy_cores: Number of cores that other processes use on this machine.
            folder: Folder for the answers of coroutines (``async_functions.cache``), or None to cache none.
        """
        self.config = config
        self._custom = config.paths_of_custom_functions()
        for path in self._custom.values():
            check_function(path, config.function_kwargs)
        self._warned = False
        options = config.async_functions
        self._cache = folder / ANSWERS if folder is not None and options.cache else None
        self._services: KillablePool | None = None
        """Process that runs custom coroutine functions, or None if there are none."""
        # A model in the run judges in its engine.
        paths = {part for path in self._custom.values() for _, part in summands(path)}
        if any(map(is_async, paths - {JUDGE} if config.judge.is_in_run else paths)):
            self._services = KillablePool(
                "reward service process",
                "reward_score",
                1,
                message_limit_s(options),
                config.memory_limit_mb,
                _prepare_verifiers,
                self._custom,
                config.function_kwargs,
                users_code=True,
            )
        super().__init__(
            "verifier process",
            "reward_score",
            config.num_workers or spare_cores(busy_cores),
            config.timeout_s,
            config.memory_limit_mb,
            _prepare_verifiers,
            self._custom,
            config.function_kwargs,
            users_code=bool(self._custom),
        )

    def __enter__(self) -> Self:
        # Start the processes now, so that their imports overlap with the work before the first batch.
        self.submit(self.run, _verify_quickly, [[]])
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
    ) -> list[Verdict]:
        """Return the verdicts on a batch, scored according to ``config.mode``; see :meth:`submit_batch`."""
        return self.submit_batch(data_sources, solutions, ground_truths, extra_infos, in_thought).result()

    def submit_batch(
        self,
        data_sources: Sequence[str],
        solutions: Sequence[str],
        ground_truths: Sequence[Any],
        extra_infos: Sequence[Mapping[str, Any] | None] | None = None,
        in_thought: Sequence[bool] | None = None,
        takes_hashes: Sequence[bool] | None = None,
    ) -> PendingVerdicts:
        """Start scoring a batch and return immediately.

        Args:
            data_sources, solutions, ground_truths, extra_infos: Sequences with one entry per response.
            in_thought: Whether each prompt opens a thought, so that a response without ``</think>`` has no answer.
                Ignored by custom functions.
            takes_hashes: Whether answers after ``####`` are well-formed; see :class:`Job`.

        Raises:
            ValueError: If a data source is unknown, a ground truth is invalid for its verifier, values are nested too
                deeply, or the sequences have different lengths.
            RuntimeError: If the pool is closed.
        """
        infos = [None] * len(solutions) if extra_infos is None else extra_infos
        opened = [False] * len(solutions) if in_thought is None else in_thought
        hashes = [False] * len(solutions) if takes_hashes is None else takes_hashes
        lengths = [len(data_sources), len(solutions), len(ground_truths), len(infos), len(opened), len(hashes)]
        require(len(set(lengths)) == 1, "batch", lengths, "needs one entry of each kind per response")
        self.check_open()
        scorers = {source: find_scorer(source, self._custom) for source in set(data_sources)}
        parts = {source: self._scored_apart(scorer) for source, scorer in scorers.items()}
        jobs = []
        for source, solution, truth, info, thinks, in_hashes in zip(
            data_sources, solutions, ground_truths, infos, opened, hashes, strict=True
        ):
            whole, summed = scorers[source], parts[source]
            for scorer in [whole] if summed is None else [whole.part(path, source) for _, path in summed]:
                text = THINK + solution if thinks and not scorer.is_custom else solution
                jobs.append(Job(scorer, source, text, truth, info, in_hashes, is_part=summed is not None))
        # Check each value once, because responses to the same prompt share them.
        for job in {(id(job.ground_truth), id(job.extra_info)): job for job in jobs}.values():
            require_shallow(job.ground_truth, "ground_truth")
            require_shallow(job.extra_info, "extra_info")
            job.scorer.accepted(job.ground_truth)
        return self.submit(self._score, jobs, [parts[source] for source in data_sources])

    def close(self) -> None:
        """Stop all processes, even in the middle of a batch."""
        super().close()
        if self._services is not None:
            self._services.close()

    def submit_judgements(self, jobs: Sequence[Job]) -> PendingVerdicts:
        """Start the calls to the judge at ``reward_score.judge.base_url`` that :meth:`submit_batch` skipped."""
        self.check_open()
        return self.submit(self._ask_services, list(jobs))

    def _score(self, jobs: list[Job], parts: list[list[tuple[float, str]] | None]) -> list[Verdict]:
        """Return one verdict per response. If the response has ``parts``, the verdicts on its jobs are added."""
        verdicts = self._score_jobs(jobs)
        totals, end = list[Verdict](), 0
        for summed in parts:
            start, end = end, end + (1 if summed is None else len(summed))
            failed = [verdict for verdict in verdicts[start:end] if verdict.failed]
            if failed or summed is None:
                totals.append((failed or verdicts[start:end])[0])
                continue
            total = add_verdicts(summed, verdicts[start:end])
            if total.reason == INAPPLICABLE.reason and not self.config.judge.waits:
                total = self.failure(none_applies(jobs[start].data_source, summed), jobs[start])
            totals.append(replace(total, extras=plain_extras(total.extras, ())))
        return totals

    def _score_jobs(self, jobs: list[Job]) -> list[Verdict]:
        """Return the verdicts on ``jobs``, running synchronous functions first and then coroutines."""
        waiting = [index for index, job in enumerate(jobs) if job.scorer.is_custom and is_async(job.scorer.path)]
        if not waiting:
            return self._score_here(jobs)
        here = sorted({*range(len(jobs))} - {*waiting})
        verdicts = dict(zip(here, self._score_here([jobs[index] for index in here]), strict=True))
        verdicts |= zip(waiting, self._ask_services([jobs[index] for index in waiting]), strict=True)
        return [verdicts[index] for index in range(len(jobs))]

    def _scored_apart(self, scorer: Scorer) -> list[tuple[float, str]] | None:
        """Return the weights and paths of a sum whose functions cannot all run in one process, or None otherwise.

        Coroutines run in an event loop, which other functions would block, and verifiers have a quick pass. A judge
        that waits for sampling or for the group is excluded, and its verdict is added later.
        """
        if not (scorer.is_custom and is_sum(scorer.path)):
            return None
        parts = summands(scorer.path)
        paths = [path for _, path in parts]
        if self.config.judge.waits and JUDGE in paths:
            return [(weight, path) for weight, path in parts if path != JUDGE]
        return parts if VERIFIER in paths or is_async(scorer.path) else None

    def _ask_services(self, jobs: list[Job]) -> list[Verdict]:
        assert self._services is not None, "a coroutine is among the custom functions"
        questions = [(job.scorer.path, *job[1:5], job.is_part) for job in jobs]
        parts = [questions[i : i + MAX_CALLS] for i in range(0, len(questions), MAX_CALLS)]
        messages = [Message(part, self.config.async_functions, self._cache) for part in parts]
        answers: list[Verdict | str | BaseException] = []
        for part, found in zip(parts, self._services.run(answer, messages), strict=True):
            answers += [found] * len(part) if isinstance(found, BaseException) else found
        verdicts = []
        for job, found in zip(jobs, answers, strict=True):
            failure = CustomFunctionError(found) if isinstance(found, str) else found
            verdict = self.failure(failure, job) if isinstance(failure, BaseException) else failure
            verdicts.append(with_score(verdict, self.config.mode))
        return verdicts

    def _score_here(self, jobs: list[Job]) -> list[Verdict]:
        chunks = [jobs[i : i + CHUNK_SIZE] for i in range(0, len(jobs), CHUNK_SIZE)]
        verdicts: list[Verdict | None] = []
        for chunk, quick in zip(chunks, self.run(_verify_quickly, chunks), strict=True):
            # If a chunk failed, its responses are verified one by one below.
            verdicts += [None] * len(chunk) if isinstance(quick, BaseException) else quick
        undecided = [index for index, verdict in enumerate(verdicts) if verdict is None]
        outcomes = self.run(Job.verdict, [jobs[index] for index in undecided])
        for index, outcome in zip(undecided, outcomes, strict=True):
            verdicts[index] = self.failure(outcome, jobs[index]) if isinstance(outcome, BaseException) else outcome
        assert None not in verdicts
        return [with_score(verdict, self.config.mode) for verdict in verdicts if verdict is not None]

    def failure(self, error: BaseException, job: Job, tolerated: bool = False) -> Verdict:
        """Return the verdict if the response caused its verifier to fail with ``error``; otherwise, raise the error.

        With ``on_function_error=fail``, errors of custom functions are raised, unless ``tolerated`` is set.
        """
        reason = failure_reason(error)
        if isinstance(error, CustomFunctionError) and (tolerated or self.config.on_function_error == "zero"):
            reason = "error"
            if not self._warned:
                self._warned = True
                logger.warning("%s; this and later such responses score 0 (verifier/error counts them)", error)
        if reason is None and isinstance(error, Exception):
            raise error
        if reason is None:  # re-raising KeyboardInterrupt or SystemExit would look like an interrupt by the user
            raise RuntimeError(f"the verifier of {job.data_source!r} raised {type(error).__name__}") from error
        boxed = extract_boxed(after_thinking(job.solution)) is not None
        extras = {"judge_failed": True} if job.scorer.path == JUDGE else {}
        own_score = job.scorer.is_custom or job.scorer.path in ZERO_IF_FAILED
        score = 0.0 if own_score else None
        return Verdict(False, boxed, reason, score=score, extras=extras, failed=job.scorer.is_custom)


def _prepare_verifiers(custom: Mapping[str, str], kwargs: Mapping[str, Any]) -> None:
    compute_score(*WARM_UP)
    use_custom_functions(custom, kwargs)


def _verify_quickly(jobs: list[Job]) -> list[Verdict | None]:
    """Return quick verdicts, or None for responses that need more time. Runs in a verifier process."""
    return [job.verdict(quick=True) for job in jobs]
