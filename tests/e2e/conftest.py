"""One run that several files read, and the end of every process that a test starts."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.runs import STARTED, Run, six_steps


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """Let Ctrl-C interrupt what the tests start: a shell that runs them in the background has them ignore it, and their
    children would inherit that."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def nothing_outlives_its_test() -> Iterator[None]:
    """Kill what a failed test left running: the next ones would be slowed by it."""
    yield
    while STARTED:
        STARTED.pop().kill()


@pytest.fixture(scope="session")
def trained(tiny_model: Path, arithmetic_prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of six steps that nothing interrupted, with a page and an exported model."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    overrides = six_steps(tiny_model, arithmetic_prompts, folder)
    overrides += ["trainer.async_save=false", "trainer.report_freq=1", "trainer.save_hf_model=true"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).with_name("import_log")), prepend=os.pathsep)
        patch.setenv("VERL_TEST_IMPORTS", str(folder.with_name("imports")))
        run = Run.complete(overrides, folder.with_name("log"))
    run.assert_nothing_left(folder)
    return folder
