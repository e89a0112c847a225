"""Progress of an evaluation: a bar on a terminal, a line every few seconds elsewhere."""

import os
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

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
        self._task: TaskID | None = None
        self._title = ""
        self._problems = self._total_problems = self._samples = self._total_samples = self._tokens = 0
        self._started = self._last_line = 0.0

    def __enter__(self) -> "EvaluationDisplay":
        if self.console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.console.is_terminal:
            self._progress.stop()

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def start(self, title: str, problems: int, samples: int) -> None:
        """Start a new bar over ``problems``, for which ``samples`` responses are generated."""
        self.finish()
        self._title, self._total_problems, self._total_samples = title, problems, samples
        self._problems = self._samples = self._tokens = 0
        self.running()
        rate = "starting the engines"
        self._task = self._progress.add_task(title, total=samples, problems=0, total_problems=problems, rate=rate)
        if not self.console.is_terminal:
            self.say(f"{title}: {samples} samples of {problems} problems to generate; {rate}")

    def running(self) -> None:
        """Measure speed from now on, because the engines have started."""
        self._started = self._last_line = time.monotonic()

    def generated(self, problems: int, samples: int, tokens: int) -> None:
        """Count completed problems, and responses with their tokens."""
        assert self._task is not None, "start comes first"
        if self._samples == 0 and samples:
            # The time left is estimated from here: starting the engines does not count.
            self._progress.reset(self._task, total=self._total_samples, start=True)
        self._problems += problems
        self._samples += samples
        self._tokens += tokens
        self._progress.update(
            self._task, completed=self._samples, problems=self._problems, rate=self._rate(), refresh=True
        )
        if time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES:
            self._print_line()

    def phase(self, text: str) -> None:
        """Show the current phase in place of the speed."""
        if self._task is not None:
            self._progress.update(self._task, rate=text)

    def finish(self) -> None:
        """Remove the bar; off a terminal, print a last line."""
        if self._task is not None:
            if self._samples:
                self._print_line()
            self._progress.remove_task(self._task)
            self._task = None

    def _rate(self) -> str:
        return f"{self._tokens / max(time.monotonic() - self._started, 1e-9):.0f} tok/s"

    def _print_line(self) -> None:
        self._last_line = time.monotonic()
        left = (self._last_line - self._started) * (self._total_samples - self._samples) / max(self._samples, 1)
        if not self.console.is_terminal:
            problems = f"{self._problems}/{self._total_problems} problems"
            self.say(f"{self._title}: {problems}  {self._rate()}  {left:.0f} s left")
