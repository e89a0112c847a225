"""The page that a run writes while it trains: no step waits for it, and nothing about it ends the run."""

import time
from pathlib import Path

import pytest

from tests.verl_pages.example_runs import write_run
from verl.run.page import PageWriter

pytestmark = pytest.mark.slow


def test_page_is_written_at_its_steps_and_after_a_failure(tmp_path: Path):
    folder, said = write_run(tmp_path / "run"), []
    writer = PageWriter(folder, 4, said.append)
    backend = writer.backend()
    for step in (0, 1, 3):
        backend.log(step, {})
    assert writer._process is None
    start = time.monotonic()
    backend.log(4, {})
    # A process is started, and not waited for; one that runs is left alone.
    assert time.monotonic() - start < 0.5 and not writer.page.exists()
    first = writer._process
    backend.log(8, {})
    assert writer._process is first and first.wait(60) == 0 and '"steps":6,' in writer.page.read_text()
    for is_written in (True, False):  # a failure after the last page leaves the page that is there
        writer.page.unlink()
        with pytest.raises(KeyboardInterrupt), writer.even_after_failure():
            raise KeyboardInterrupt
        assert said == [f"page: {folder}/report.html"] and writer.page.exists() == is_written


def test_the_process_ends_with_the_run(tmp_path: Path):
    writer = PageWriter(write_run(tmp_path / "run"), 1, print)
    writer.after_step(1)
    process = writer._process
    writer.backend().close()
    assert process.returncode == -9 and list((tmp_path / "run").glob(".*")) == []


@pytest.mark.parametrize("freq", [-1, 0])
def test_a_page_that_cannot_be_written_is_a_line(tmp_path: Path, freq: int):
    folder, said = write_run(tmp_path / "run"), []
    (folder / "report.html").mkdir()
    writer = PageWriter(folder, freq, said.append)
    writer.after_step(5)
    writer.finish()
    line = f"warning: the page was not written; `verl-report {folder}` makes it, and says why not"
    assert said == ([line] if freq == 0 else [])
