"""Display of an evaluation or analysis, which continues without the models and benchmarks that failed."""

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from verl.config.errors import ConfigError
from verl.run.display import RunDisplay
from verl.run.exit_codes import INTERRUPTED

COLUMNS = {
    "problems": ("problems", ".0f"),
    "tok/s": ("tokens_per_s", ".0f"),
    "seconds left": ("seconds_left", ".0f"),
}
"""Metrics shown next to the progress bar."""

SECONDS_BETWEEN_LINES = 15.0
"""Interval in seconds between progress lines when stdout is not a terminal."""


class EvaluationDisplay(RunDisplay):
    """Progress display of an evaluation: a bar over the samples of the current model, and a list of errors."""

    def __init__(self, title: str = "evaluation") -> None:
        super().__init__(title, 0, COLUMNS, "sample")
        self._last_line = 0.0
        self.errors: list[str] = []
        """One error message for each model or benchmark that could not be evaluated."""
        self.missing_benchmarks: list[str] = []
        """Names of benchmarks that could not be loaded."""

    def begin_model(self, title: str, samples: int) -> None:
        """Start a progress bar over the missing samples of a model."""
        self._total, self._last_line = samples, time.monotonic()
        self.begin(0)
        self._progress.update(self._task, total=samples, description=title)

    def step(self, step: int, metrics: Mapping[str, float], note: str = "") -> None:
        """Show progress; without a terminal, print a line every ``SECONDS_BETWEEN_LINES`` and at the end."""
        now = time.monotonic()
        if self.console.is_terminal or now - self._last_line >= SECONDS_BETWEEN_LINES or step == self._total:
            self._last_line = now
            super().step(step, metrics, note)

    def fail(self, error: Exception | str, what: str = "") -> None:
        """Print and record an error; ``what`` is the model or benchmark that is skipped because of it."""
        line = f"{what}: {error}" if what else str(error)
        if line not in self.errors:  # the same error can recur at every temperature
            self.errors.append(line)
            self.say(f"error: {line}")

    @contextmanager
    def recorded(self, what: str = "") -> Iterator[None]:
        """Record a ``ConfigError`` raised in the block and suppress it; ``what`` is passed to :meth:`fail`."""
        try:
            yield
        except ConfigError as error:
            self.fail(error, what)


@contextmanager
def displayed(title: str, kept: str) -> Iterator[EvaluationDisplay]:
    """Show an evaluation's display within the block; on an interrupt, report that ``kept`` is preserved.

    Raises:
        SystemExit: The exit code is 1 if some evaluations failed, or 130 after an interrupt.
    """
    display = EvaluationDisplay(title)
    with display:
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
