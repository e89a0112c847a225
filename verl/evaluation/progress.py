"""Display of a running evaluation: a bar on a terminal, a line every few seconds elsewhere, and its errors."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, Task, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from verl.config.errors import ConfigError, visible
from verl.run.exit_codes import INTERRUPTED

SECONDS_BETWEEN_LINES = 15.0
"""How often progress is printed without a terminal."""

COLUMNS_OFF_TERMINAL = 140
"""Width of tables in a log whose width is unknown."""


class EvaluationDisplay:
    """A progress bar over problems, with tokens per second and the time left; use it as a context manager."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        if console is None and not self.console.is_terminal and "COLUMNS" not in os.environ:
            self.console = Console(width=COLUMNS_OFF_TERMINAL)
        self.errors: list[str] = []
        """A line for each model or benchmark that could not be evaluated."""
        self.missing_benchmarks: list[str] = []
        """Names of those that could not be loaded."""
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[problems]}/{task.fields[total_problems]} problems"),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=self.console,
        )
        self._bar: Task | None = None
        self._tokens = 0
        self._started = self._last_line = 0.0

    def __enter__(self) -> "EvaluationDisplay":
        if self.console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.console.is_terminal:
            self._progress.stop()

    def say(self, text: str) -> None:
        """Print a line above the bar. What a terminal would obey is shown: values come from files of others too."""
        self.console.print(visible(text), highlight=False, markup=False, soft_wrap=True)

    def fail(self, error: Exception | str, what: str = "") -> None:
        """Print and keep an error; ``what``: the model or benchmark that is not evaluated because of it."""
        line = f"{what}: {error}" if what else str(error)
        if line not in self.errors:  # the same error may occur at every temperature
            self.errors.append(line)
            self.say(f"error: {line}")

    @contextmanager
    def recorded(self, what: str = "") -> Iterator[None]:
        """Keep a ``ConfigError`` that is raised within, and go on after it; ``what`` as in :meth:`fail`."""
        try:
            yield
        except ConfigError as error:
            self.fail(error, what)

    def start(self, title: str, problems: int, samples: int) -> None:
        """Start a new bar over ``problems``, for which ``samples`` responses are generated."""
        self.finish()
        self._tokens = 0
        self.running()
        rate = "starting the engines"
        self._progress.add_task(title, total=samples, problems=0, total_problems=problems, rate=rate)
        (self._bar,) = self._progress.tasks
        if not self.console.is_terminal:
            self.say(f"{title}: {samples} samples of {problems} problems to generate; {rate}")

    def running(self) -> None:
        """Measure speed from now on, because the engines have started."""
        self._started = self._last_line = time.monotonic()

    def generated(self, problems: int, samples: int, tokens: int) -> None:
        """Count completed problems, and responses with their tokens."""
        bar = self._bar
        assert bar is not None, "start comes first"
        if bar.completed == 0 and samples:
            # The time left is estimated from here: starting the engines does not count.
            self._progress.reset(bar.id)
        self._tokens += tokens
        problems += bar.fields["problems"]
        self._progress.update(bar.id, advance=samples, problems=problems, rate=self._rate(), refresh=True)
        if time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES:
            self._print_line(bar)

    def phase(self, text: str) -> None:
        """Show the current phase in place of the speed."""
        if self._bar is not None:
            self._progress.update(self._bar.id, rate=text)

    def finish(self) -> None:
        """Remove the bar; off a terminal, print a last line."""
        if self._bar is not None:
            if self._bar.completed:
                self._print_line(self._bar)
            self._progress.remove_task(self._bar.id)
            self._bar = None

    def _rate(self) -> str:
        return f"{self._tokens / max(time.monotonic() - self._started, 1e-9):.0f} tok/s"

    def _print_line(self, bar: Task) -> None:
        self._last_line = time.monotonic()
        left = (self._last_line - self._started) * (bar.remaining or 0) / max(bar.completed, 1)
        if not self.console.is_terminal:
            problems = f"{bar.fields['problems']}/{bar.fields['total_problems']} problems"
            self.say(f"{bar.description}: {problems}  {self._rate()}  {left:.0f} s left")


@contextmanager
def displayed(kept: str) -> Iterator[EvaluationDisplay]:
    """Show the display of an evaluation within the block; on an interrupt, report that ``kept`` stays.

    Raises:
        SystemExit: with 1 if some evaluations failed; with 130 after an interrupt.
    """
    with EvaluationDisplay() as display:
        try:
            yield display
        except KeyboardInterrupt:
            display.say(f"interrupted; {kept} are kept, and the same command resumes from them")
            sys.exit(INTERRUPTED)
        if display.errors:
            count = len(display.errors)
            display.say(f"{count} evaluation{'s' * (count > 1)} failed; see the errors above")
            if display.missing_benchmarks:
                names = ", ".join(display.missing_benchmarks)
                display.say(f"without {names}; docs/evaluation.md says where benchmarks come from")
            sys.exit(1)
