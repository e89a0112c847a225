"""Writes a run's report in a separate process, so that it does not delay training."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from verl.run.tracker_backends import Backend
from verl_pages import PAGE

LAST_PAGE_S = 120.0
"""Maximum seconds to wait for the report at the end of a run."""


class PageWriter:
    """Writes ``report.html`` to a run's folder every ``freq`` steps (see ``trainer.report_freq``) and at the end."""

    def __init__(self, folder: Path, freq: int, say: Callable[[str], None]) -> None:
        self.page = folder / PAGE
        self._folder, self._freq, self._say = folder, freq, say
        self._process: subprocess.Popen[bytes] | None = None
        self._behind = False
        """Whether a step has been recorded since the last call to :meth:`finish`."""

    @contextmanager
    def even_after_failure(self) -> Iterator[None]:
        """Write a report of the steps recorded so far if the block raises an exception."""
        try:
            yield
        except BaseException:
            if self._behind:
                self.finish()
            raise

    def backend(self) -> Backend:
        """Return a tracker backend that updates the report after each recorded step."""
        return Backend(lambda step, metrics: self.after_step(step), self.stop)

    def after_step(self, step: int) -> None:
        """Start writing the report if it is due and no report is being written."""
        self._behind = True
        running = self._process is not None and self._process.poll() is None
        if self._freq > 0 and step > 0 and step % self._freq == 0 and not running:
            self._start()

    def finish(self) -> None:
        """Write the report of the whole run and print its path."""
        self._behind = False
        self.stop()
        if self._freq < 0:
            return
        self._start()
        code = None
        try:
            code = self._process.wait(LAST_PAGE_S) if self._process else None
        except subprocess.TimeoutExpired:
            self.stop()
        failed = f"warning: the page was not written; `verl-report {self._folder}` makes it, and says why not"
        self._say(f"page: {self.page}" if code == 0 else failed)

    def stop(self) -> None:
        """Kill the report process if it is running. Any existing report remains unchanged."""
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.kill()
            process.wait()
            self.page.with_name(f".{PAGE}.unfinished").unlink(missing_ok=True)

    def _start(self) -> None:
        quiet = subprocess.DEVNULL
        command = [sys.executable, "-m", "verl_pages.command", "--background", str(self._folder)]
        try:
            self._process = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet)
        except OSError as error:
            self._say(f"warning: the page of the run cannot be made ({error.strerror})")
