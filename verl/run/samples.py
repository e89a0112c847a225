"""Stores a run's responses in its ``samples/`` folder, as one Parquet file per training step and validation.

Files become visible only when complete. Any Parquet reader can load the folder: ``pandas.read_parquet(folder)``.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Literal, Self

import pyarrow as pa
import pyarrow.parquet as pq

from verl.checkpoint.attempts import Attempt
from verl.config.trainer import SamplesConfig
from verl.utils.files import free_name, replacing, storage_line
from verl_pages.run_folder import SAMPLES, SampleFile, sample_files

Split = Literal["train", "val"]


class SampleStore:
    """Context manager that writes samples in the background and waits for all writes on exit.

    If the disk is full or fails, the store prints a warning and stops writing samples, but the run continues.

    Writes raise ``StaleAttempt`` once an attempt newer than ``attempt`` has taken over.
    """

    def __init__(self, root: Path, config: SamplesConfig, attempt: Attempt, say: Callable[[str], None]) -> None:
        self.folder, self.config = root / SAMPLES, config
        self._attempt, self._say = attempt, say
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="samples")
        self._pending: Future[None] | None = None
        self._failed = False
        for path in self.folder.glob(".*.unfinished"):
            path.unlink()
        self._sizes = {file: (self.folder / file.name).stat().st_size for file in sample_files(self.folder)}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.flush()
        finally:
            self._thread.shutdown()

    def wants(self, split: Split, step: int) -> bool:
        """Return whether to store the responses of this step."""
        freq = self.config.freq
        return freq > 0 and not self._failed and (split == "val" or step == 1 or step % freq == 0)

    def keep(self, split: Split, step: int, make_table: Callable[[], pa.Table]) -> None:
        """Wait for the previous table to be written, then write the table from ``make_table`` in the background."""
        self.flush()
        if self.wants(split, step):
            self._pending = self._thread.submit(self._write, SampleFile(step, split), make_table)

    def flush(self) -> None:
        """Wait until all tables passed to :meth:`keep` are on disk."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.result()
        except OSError as error:
            self._failed = True
            line = storage_line(error, self.folder) or f"{self.folder}: cannot be written ({error.strerror or error})"
            self._say(f"warning: {line.partition(';')[0]}; no further responses are kept")

    def _write(self, file: SampleFile, make_table: Callable[[], pa.Table]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with replacing(self.folder / file.name) as temporary:
            pq.write_table(make_table(), temporary, compression="zstd")
            self._attempt.check(self.folder / file.name)
        self._sizes[file] = (self.folder / file.name).stat().st_size
        for victim in superfluous(self._sizes, self.config.max_mb * 2**20):
            (self.folder / victim.name).unlink(missing_ok=True)
            del self._sizes[victim]


def superfluous(sizes: dict[SampleFile, int], limit: float) -> Iterator[SampleFile]:
    """Yield files to remove until the rest take up at most ``limit`` bytes. The newest file is never removed.

    Training files are removed first. Within a split, odd steps come before multiples of 2, then of 4, oldest first.
    """
    total = sum(sizes.values())
    left = sorted(sizes)[:-1]
    while total > limit and left:
        victim = min(left, key=lambda file: (file.split == "val", _halvings(file.step), file))
        left.remove(victim)
        total -= sizes[victim]
        yield victim


def _halvings(step: int) -> int:
    """Return 1 plus the number of times that ``step`` is divisible by 2, or 64 for step 0."""
    return (step & -step).bit_length() if step else 64


def drop_samples(root: Path, last_step: int | None) -> None:
    """Remove the samples of the run in ``root`` after ``last_step``, or all samples if ``last_step`` is None."""
    folder = root / SAMPLES
    for file in sample_files(folder):
        if last_step is None or file.step > last_step:
            (folder / file.name).unlink()


def set_aside_samples(root: Path) -> None:
    """Rename the samples of the run in ``root``, so that the next run does not delete them."""
    folder = root / SAMPLES
    if sample_files(folder):
        folder.rename(free_name(folder, "."))
