import errno
import re
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pytest

from verl.checkpoint.attempts import Attempt, StaleAttempt
from verl.config.trainer import SamplesConfig
from verl.run.samples import SampleStore, drop_samples, set_aside_samples, superfluous
from verl_pages.run_folder import SampleFile, sample_files

EVERYTHING = SamplesConfig(freq=1, fraction=1.0, max_mb=1.0, tokens=False)


def store(root: Path, config: SamplesConfig = EVERYTHING, say: Callable[[str], None] = print) -> SampleStore:
    return SampleStore(root, config, Attempt.claim(root), say)


def rows(step: int, split: str = "train") -> Callable[[], pa.Table]:
    return lambda: pa.table({"step": [step], "split": [split]})


def test_every_step_is_a_file_and_all_are_read_as_one(tmp_path: Path):
    with store(tmp_path) as samples:
        samples.keep("val", 0, rows(0, "val"))
        samples.keep("train", 1, rows(1))
        samples.keep("train", 2, rows(2))
        samples.keep("val", 2, rows(2, "val"))
    names = ["val_000000.parquet", "train_000001.parquet", "train_000002.parquet", "val_000002.parquet"]
    assert [file.name for file in sample_files(tmp_path / "samples")] == names
    assert sorted(path.name for path in (tmp_path / "samples").iterdir()) == sorted(names)
    together = pd.read_parquet(tmp_path / "samples")
    found = sorted(zip(together.step, together.split, strict=True))
    assert found == [(0, "val"), (1, "train"), (2, "train"), (2, "val")]


@pytest.mark.parametrize(("freq", "kept"), [(1, [1, 2, 3, 4, 5, 6]), (3, [1, 3, 6]), (0, [])])
def test_sample_frequency_for_training_and_validation(tmp_path: Path, freq: int, kept: list[int]):
    with store(tmp_path, SamplesConfig(freq, 1.0, 1.0, False)) as samples:
        assert [step for step in range(1, 7) if samples.wants("train", step)] == kept
        assert samples.wants("val", 5) is (freq > 0)
        samples.keep("train", 2, rows(2))
    assert len(sample_files(tmp_path / "samples")) == (freq == 1)


def test_samples_stay_below_their_limit():
    sizes: dict[SampleFile, int] = {}
    for step in range(1, 101):
        sizes[SampleFile(step, "train")] = 10
        if step % 20 == 0:
            sizes[SampleFile(step, "val")] = 10
        for victim in superfluous(sizes, 160):
            del sizes[victim]
        assert sum(sizes.values()) <= 160
    assert [file.step for file in sorted(sizes) if file.split == "val"] == [20, 40, 60, 80, 100]
    assert [file.step for file in sorted(sizes) if file.split == "train"] == [*range(16, 97, 8)]
    # The newest stays, however large; validations go last.
    newest, older = SampleFile(3, "train"), SampleFile(0, "val")
    assert list(superfluous({newest: 500, older: 1, SampleFile(2, "train"): 1}, 100)) == [SampleFile(2, "train"), older]


def test_killed_sample_store_leaves_complete_files(tmp_path: Path):
    with store(tmp_path) as samples:
        for step in (1, 2, 3):
            samples.keep("train", step, rows(step))
        samples.keep("val", 2, rows(2, "val"))
    folder = tmp_path / "samples"
    (folder / ".train_000004.parquet.unfinished").write_bytes(b"PAR1")
    for name in ("notes.txt", "train_0000002.parquet", "val_00000\u0664.parquet"):  # not ours
        (folder / name).write_text("")
    drop_samples(tmp_path, 2)
    with store(tmp_path) as samples:
        samples.keep("train", 3, rows(3))
    files = [SampleFile(1, "train"), SampleFile(2, "train"), SampleFile(2, "val"), SampleFile(3, "train")]
    assert sample_files(folder) == files and len(list(folder.iterdir())) == 7
    set_aside_samples(tmp_path)
    assert len(sample_files(tmp_path / "samples.1")) == 4 and not folder.exists()
    set_aside_samples(tmp_path)
    drop_samples(tmp_path, None)
    assert len(sample_files(tmp_path / "samples.1")) == 4


def test_a_newer_attempt_is_not_written_over(tmp_path: Path):
    with pytest.raises(StaleAttempt, match="train_000001.parquet: not written by attempt 1"), store(tmp_path) as old:
        Attempt.claim(tmp_path)
        old.keep("train", 1, rows(1))
    assert sample_files(tmp_path / "samples") == []


def test_full_disk_ends_samples_and_not_the_run(tmp_path: Path):
    def full() -> pa.Table:
        raise OSError(errno.ENOSPC, "No space left on device")

    said: list[str] = []
    with store(tmp_path, say=said.append) as samples:
        samples.keep("train", 1, full)
        samples.keep("train", 2, rows(2))
        samples.keep("train", 3, rows(3))
        assert not samples.wants("val", 3)
    folder = tmp_path / "samples"
    (line,) = said
    pattern = r"cannot be written \(No space left on device, [\d,.]+ MB free\); no further responses are kept"
    assert re.fullmatch(f"warning: {re.escape(str(folder))}: {pattern}", line)
    assert sample_files(folder) == []
