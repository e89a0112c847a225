"""Prints a run's progress, errors and final tables. Progress is a live bar on a terminal, and lines otherwise."""

import os
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from verl.config.errors import ConfigError, visible
from verl.run.exit_codes import INTERRUPTED

MAX_SHOWN, MAX_FACT = 2000, 200
"""Maximum number of characters shown per prompt or response, and per value printed above them."""

PHASES = {
    "gen": "sampling",
    "old_log_prob": "computing log-probabilities",
    "update_critic": "updating the critic",
    "update_actor": "updating the policy",
    "train": "learning",
}
"""Text printed for each phase of the first step and of slow steps."""

SLOW_STEP_S = 60.0
"""Seconds after which a step counts as slow. Without a terminal, its remaining phases are printed."""

Columns = Mapping[str, tuple[str, str]]
"""Maps each header in a progress bar to the name and format of its metric."""

SAMPLING = {
    "problems": ("problems", ".0f"),
    "tok/s": ("tokens_per_s", ".0f"),
    "seconds left": ("seconds_left", ".0f"),
}
"""Metrics shown while an evaluation or analysis is sampling."""

SAMPLING_LINES_S = 15.0
"""Seconds between an evaluation's progress lines if the output is not a terminal."""


class RunDisplay:
    """Progress bar over the steps of a run, with the latest metrics below it. Use it as a context manager.

    Args:
        title: Name of the run to show.
        total_steps: Number of steps for a full bar.
        unit: Name of a step.
        line_s: Minimum number of seconds between progress lines if the output is not a terminal.
    """

    def __init__(self, title: str, total_steps: int, columns: Columns, unit: str = "step", line_s: float = 0.0) -> None:
        self.console = Console()
        self._columns = columns
        self._shown: dict[str, float] = {}
        self._unit, self._line_s = unit, line_s
        self._last_step, self._last_line, self._announced = 0, 0.0, ""
        self._ended: float | None = None
        self.errors: list[str] = []
        """Error messages, one line for each failed part of the run, such as a model or a benchmark."""
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[phase]:<10}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self._task = self._progress.add_task(title, total=total_steps, phase="")
        self._figures = Text()
        self._spinner = self.console.status("")
        # Without a terminal, lines cannot be redrawn, so every step prints its own line.
        redraws = self.console.is_terminal and (
            getattr(self.console.file, "isatty", bool)() or os.environ.get("TTY_COMPATIBLE") == "1"
        )
        self._live = Live(Group(self._progress, self._figures), console=self.console) if redraws else None

    def begin(self, step: int, **bar: Any) -> None:
        """Restart the bar after ``step``, with a new ``description`` or ``total`` if provided.

        The metrics of earlier attempts are no longer shown.
        """
        self._shown.clear()
        self._figures.plain = ""
        self._progress.reset(self._task, completed=step, **bar)
        self._last_step, self._last_line, self._ended = step, time.monotonic(), None

    def stage(self, text: str) -> None:
        """Show the current startup stage next to a spinner on a terminal, or on a separate line otherwise."""
        if self._live is None:
            self.say(text)
        elif self._live.is_started:
            self.phase(text)
        else:
            self._spinner.update(Text(visible(text)))
            self._spinner.start()

    def end_stages(self) -> None:
        """Remove the spinner."""
        self._spinner.stop()

    def __enter__(self) -> "RunDisplay":
        self.end_stages()
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def phase(self, name: str) -> None:
        """Show the current phase. Without a terminal, only phases of the first step and of slow steps are printed."""
        self._progress.update(self._task, phase=name)
        if self._live is not None or name not in PHASES:
            return
        if self._ended is None or time.monotonic() - self._ended > SLOW_STEP_S:
            line = f"{self._unit} {self._last_step + 1}: {PHASES[name]}"
            if line != self._announced:
                self.say(line)
            self._announced = line

    def say(self, text: str) -> None:
        """Print a line above the bar. Control characters are escaped, because text may come from untrusted files."""
        self.console.print(visible(text), highlight=False, markup=False, emoji=False, soft_wrap=True)

    def step(self, step: int, metrics: Mapping[str, float], note: str = "") -> None:
        """Show a finished step with its metrics and an optional note."""
        self._shown.update(metrics)
        # The bar keeps showing the last validation, whereas a line contains only this step's metrics.
        known = metrics if self._live is None else self._shown
        parts = [f"{header} {known[name]:{form}}" for header, (name, form) in self._columns.items() if name in known]
        figures = "  ".join([*parts, note] if note else parts)
        self._progress.update(self._task, completed=step)
        self._figures.plain = figures
        now, total = time.monotonic(), self._progress.tasks[0].total
        if step > self._last_step:
            self._last_step, self._ended = step, now
        if self._live is None and (step == total or now - self._last_line >= self._line_s):
            self._last_line = now
            self.say(f"{self._unit} {step}/{total}  {figures}")

    def fail(self, error: Exception | str, what: str = "") -> None:
        """Print and record an error. ``what`` is the model or benchmark that is skipped because of it."""
        line = f"{what}: {error}" if what else str(error)
        if line not in self.errors:  # the same error can recur at every temperature
            self.errors.append(line)
            self.say(f"error: {line}")

    @contextmanager
    def recorded(self, what: str = "") -> Iterator[None]:
        """Record a ``ConfigError`` raised in the block and suppress it. ``what`` is passed to :meth:`fail`."""
        try:
            yield
        except ConfigError as error:
            self.fail(error, what)

    def sample(self, facts: Mapping[str, str], prompt: str, response: str) -> None:
        """Show a line of ``facts``, a prompt and its response. The middle of long texts is omitted."""
        # Escape line breaks, so that model output cannot imitate the run's own lines.
        shown = {name: _shortened(visible(value).replace("\n", "\\n"), MAX_FACT) for name, value in facts.items()}
        self.say(" | ".join(f"{name} {value}" for name, value in shown.items()))
        texts = (_shortened(visible(text), MAX_SHOWN) for text in (prompt, response))
        self.say(textwrap.indent("\n> ".join(texts), "    "))

    def table(self, title: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table with text in the first column and numbers in the other columns."""
        table = Table(title=title, title_justify="left")
        for i, header in enumerate(headers):
            table.add_column(header, justify="left" if i == 0 else "right")
        for row in rows:
            table.add_row(*row)
        self.console.print(table)


@contextmanager
def sampling_display(title: str, kept: str) -> Iterator[RunDisplay]:
    """Show the progress of an evaluation or analysis. On Ctrl-C, tell the user what is ``kept``.

    Raises:
        SystemExit: The exit code is 1 if some evaluations failed, or 130 after an interrupt.
    """
    with RunDisplay(title, 0, SAMPLING, "sample", SAMPLING_LINES_S) as display:
        try:
            yield display
        except KeyboardInterrupt:
            display.say(f"interrupted; {kept} are kept, and the same command resumes from them")
            sys.exit(INTERRUPTED)
        if display.errors:
            count = len(display.errors)
            display.say(f"{count} evaluation{'s' * (count > 1)} failed; see the errors above")
            sys.exit(1)


def _shortened(text: str, limit: int) -> str:
    left_out = len(text) - limit
    if left_out <= 0:
        return text
    half = limit // 2
    return f"{text[:half]} [... {left_out} characters ...] {text[-half:]}"


def share_rows(seconds: Mapping[str, float]) -> list[list[str]]:
    """Return table rows with each phase, its seconds and its share of the total time, longest first."""
    total = sum(seconds.values()) or 1.0
    longest_first = sorted(seconds.items(), key=lambda item: -item[1])
    return [[name, f"{value:.1f} s", f"{value / total:.0%}"] for name, value in longest_first]
