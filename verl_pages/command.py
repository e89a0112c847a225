"""The command ``verl-report RUN [RUN ...]``, which writes one HTML page about training runs or lists them."""

import argparse
import ctypes
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from verl.config.errors import ConfigError, visible
from verl.utils.files import storage_line
from verl_pages import PAGE
from verl_pages.listing import print_runs
from verl_pages.run import write_page

MEMORY_BYTES = 4 << 30
"""Memory limit for building a page, because even a file of a few kilobytes could decompress to any size."""

PR_SET_PDEATHSIG = 1
"""Linux ``prctl`` option for the signal that this process receives when its parent thread ends."""


def main() -> None:
    """Run the ``verl-report`` command."""
    arguments = _parser().parse_args()
    if arguments.serve:
        raise SystemExit(f"error: --serve is gone: open RUN/{PAGE}, which follows a run that trains (docs/report.md)")
    if arguments.background:
        stay_in_background()
    try:
        with limited_memory():
            if arguments.list:
                print_runs(arguments.runs)
            else:
                write(arguments.runs, arguments.out)
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from None


def write(folders: list[Path], out: Path | None) -> None:
    """Write the page of the runs in ``folders`` and print its path."""
    out = out or (folders[0] / PAGE if len(folders) == 1 else Path(PAGE))
    try:
        for line in write_page(folders, out):
            print(f"warning: {visible(line)}", file=sys.stderr)
    except OSError as error:
        line = storage_line(error, out) or f"{out}: cannot be written ({error.strerror})"
        raise SystemExit(f"error: {line}") from None
    except MemoryError:
        raise SystemExit(f"error: the page needs more than {MEMORY_BYTES >> 30} GiB; name fewer runs") from None
    print(f"page: {out}")


@contextmanager
def limited_memory() -> Iterator[None]:
    """Limit the process's memory inside the block to its current size plus ``MEMORY_BYTES``."""
    before = soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    # The data size is available only on Linux, which is also the only system that enforces the limit.
    limit = MEMORY_BYTES + getattr(psutil.Process().memory_info(), "data", 0)
    if soft != resource.RLIM_INFINITY:
        limit = min(limit, soft)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def stay_in_background() -> None:
    """Run this process at the lowest priority, ignore Ctrl-C, and end with the parent process."""
    os.nice(19)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="verl-report", description="Make a page of training runs.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, or of runs")
    help_out = f"the page; default: {PAGE} in RUN, or here where several are named"
    parser.add_argument("--out", type=Path, metavar="FILE", help=help_out)
    parser.add_argument("--list", action="store_true", help="print a table of the runs instead, the newest first")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    # Training runs use this option to write their page without slowing down training.
    parser.add_argument("--background", action="store_true", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    main()
