"""Write docs/from_verl_options.md: what becomes of each of veRL's options, by the translator's own table.

python scripts/make_from_verl.py [--check]

With --check nothing is written, and exit code 1 means that the page is stale.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from verl.cli.verl_options import OPTIONS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "from_verl_options.md"
HEAD = """# veRL's options

What becomes of each option of a command of veRL's ([from_verl.md](from_verl.md)). Options of one meaning share a row. A
name that ends in `.*` stands for the other options of its group. "only `x`": this value has no effect, and any other
is refused. Written by `scripts/make_from_verl.py`.
"""


def tables() -> str:
    """All tables: one for each section, whose options of one meaning share a row."""
    sections: dict[str, dict[str, list[str]]] = {}
    for name, option in OPTIONS.items():
        meaning = "the same name" if option.describe() == f"`{name}`" else option.describe()
        sections.setdefault(option.section, {}).setdefault(meaning, []).append(f"`{name}`")
    return "\n".join(_table(title, rows) for title, rows in sections.items())


def _table(title: str, rows: dict[str, list[str]]) -> str:
    heading = f"`{title}`" if title[0].islower() else title
    # What is translated comes before what is refused or has no effect.
    ordered = sorted(
        rows, key=lambda meaning: meaning.startswith(("only", "refused")) + 2 * meaning.startswith("no effect")
    )
    lines = "\n".join(f"| {', '.join(rows[meaning])} | {meaning} |" for meaning in ordered)
    return f"## {heading}\n\n| veRL's option | Here |\n|---|---|\n{lines}\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the tables, or check them; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if the page is stale")
    check = parser.parse_args(argv).check
    current = f"{HEAD}\n{tables()}"
    if not check:
        PAGE.write_text(current)
    elif PAGE.read_text() != current:
        print("docs/from_verl_options.md is stale; run: python scripts/make_from_verl.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
