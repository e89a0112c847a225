"""``verl-report RUN [RUN ...]``: one page of one or several training runs; ``--serve`` while they go on."""

import argparse
import sys
from pathlib import Path

from verl.config.errors import ConfigError
from verl.report.page import PAGE, write_page


def main() -> None:
    """The command line."""
    arguments = _parser().parse_args()
    folders: list[Path] = arguments.runs
    try:
        out = arguments.out or (folders[0] / PAGE if len(folders) == 1 else Path(PAGE))
        for line in write_page(folders, out):
            print(f"warning: {line}", file=sys.stderr)
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from None
    except OSError as error:
        raise SystemExit(f"error: {out}: cannot be written ({error.strerror})") from None
    print(f"page: {out}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="verl-report", description="Make a page of training runs.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, with metrics.jsonl")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help=f"the page; default: {PAGE} in the folder of a single run, here for several",
    )
    return parser


if __name__ == "__main__":
    main()
