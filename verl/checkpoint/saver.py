"""Writes, completes and removes checkpoints for all trainers."""

import json
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from verl.checkpoint.attempts import Attempt
from verl.checkpoint.folders import (
    begin_checkpoint,
    checkpoints,
    complete_checkpoint,
    remove_checkpoints,
    steps_to_keep,
)


class CheckpointWriters(Protocol):
    """Interface to the workers, each of which writes its shards of a checkpoint."""

    def run(self, method: str, *arguments: Any) -> list[Any]:
        """Call ``method`` on every worker and return the results in rank order."""


@dataclass(frozen=True)
class _Unfinished:
    step: int
    folder: Path
    state: str
    scores: Mapping[int, float]


@dataclass
class CheckpointSaver:
    """Makes the workers write checkpoints, optionally in the background, and then completes each checkpoint."""

    attempt: Attempt
    """Current attempt, including the path of the run's folder."""
    workers: CheckpointWriters
    background: bool
    """Whether training continues while a checkpoint is written. :meth:`poll` or :meth:`finish` then completes it."""
    huggingface: bool
    """Whether checkpoints also contain the models in ``transformers`` format."""
    newest: int
    """Number of newest checkpoints to keep in addition to the best one, or 0 to keep all checkpoints."""
    always: Collection[int] = ()
    """Steps whose checkpoints are always kept."""
    saved_step: int | None = field(default=None, init=False)
    """Step of the last checkpoint that was completed."""
    _unfinished: _Unfinished | None = field(default=None, init=False)

    def save(self, step: int, state: Mapping[str, Any], scores: Mapping[int, float]) -> None:
        """Write a checkpoint of the current models.

        Raises ``WorkerError`` if this checkpoint or the previous background checkpoint could not be written.

        Args:
            state: Trainer state as JSON values.
            scores: Step -> validation score, by which the best checkpoint is determined.
        """
        self.finish()
        text = json.dumps(state, indent=2) + "\n"
        self._unfinished = _Unfinished(step, begin_checkpoint(self.attempt, step), text, dict(scores))
        self._run("save", self._unfinished.folder, self.background, self.huggingface)
        if not self.background:
            self.finish()

    def poll(self, wait: bool = False) -> None:
        """Finalize the checkpoint if all workers have written their parts. With ``wait``, wait for the workers first.

        Raises ``WorkerError`` if writing in the background failed.
        """
        done = self._unfinished
        if done is None:
            return
        shares = self._run("finish_save", wait)
        if any(share is None for share in shares):
            return
        records = {name: record for share in shares for name, record in share.items()}
        try:
            complete_checkpoint(done.folder, done.step, done.state, records)
        except BaseException:
            self._abandon()
            raise
        self._unfinished = None
        self.saved_step = done.step
        root = self.attempt.root
        keep = steps_to_keep(checkpoints(root), self.newest, self.always, done.scores)
        self.attempt.check(root)
        remove_checkpoints(root, keep)

    def finish(self) -> None:
        """Wait for the workers and complete the checkpoint. Raises the same errors as :meth:`poll`."""
        self.poll(wait=True)

    def _run(self, method: str, *arguments: Any) -> list[Any]:
        try:
            return self.workers.run(method, *arguments)
        except BaseException:
            self._abandon()
            raise

    def _abandon(self) -> None:
        """Remove the unfinished checkpoint. Earlier checkpoints are kept."""
        if self._unfinished is not None:
            shutil.rmtree(self._unfinished.folder, ignore_errors=True)
            self._unfinished = None
