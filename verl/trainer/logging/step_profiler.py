"""Torch profiler traces of single steps, one file per worker."""

from collections.abc import Callable, Sequence
from pathlib import Path

from verl.config.errors import ConfigError
from verl.single_controller.worker_group import WorkerGroup


def check_profile_steps(steps: Sequence[int], total_steps: int) -> None:
    """Raise ``ConfigError`` if ``trainer.profile_steps`` names a step that the run does not have."""
    late = [step for step in steps if step > total_steps]
    if late:
        raise ConfigError(f"trainer.profile_steps={list(steps)}: the run has {total_steps} steps; leave out {late}")


class StepProfiler:
    """Has the workers write ``profile/step_N_rank_R.json.gz`` for the given steps.

    Args:
        steps: counted from 1.
        folder: the run's folder.
        say: prints a line.
    """

    def __init__(self, workers: WorkerGroup, steps: Sequence[int], folder: Path, say: Callable[[str], None]) -> None:
        self._workers = workers
        self._steps = frozenset(steps)
        self._folder = folder / "profile"
        self._say = say

    def begin(self, step: int) -> None:
        """Start recording if ``step`` is to be profiled."""
        if step in self._steps:
            self._workers.start_profile()

    def end(self, step: int) -> None:
        """Write the trace of ``step`` if it was recorded."""
        if step in self._steps:
            ranks = range(self._workers.world_size)
            self._workers.stop_profile([self._folder / f"step_{step}_rank_{rank}.json.gz" for rank in ranks])
            self._say(f"profile of step {step}: {self._folder}/step_{step}_rank_*.json.gz (https://ui.perfetto.dev)")
