"""Write docs/from_verl_options.md: what becomes of each of veRL's options, by the translator's own table.

python scripts/make_from_verl.py [--check]

With --check nothing is written, and exit code 1 means that the page is stale.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from verl.cli.rules import VERL as OPTIONS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "from_verl_options.md"
HEAD = """# veRL's options

What becomes of each option of a command of veRL's ([from_verl.md](from_verl.md)). Options of one meaning share a row. A
name that ends in `.*` stands for the other options of its group. Translated options come first, by group; those with
[one value](#one-value-or-refused) or [no effect](#no-effect) here follow. Written by `scripts/make_from_verl.py`.
"""
VERL = "actor_rollout_ref"
"""The group of veRL's that has no counterpart: ``actor_rollout_ref.actor`` is our ``actor``."""
REFUSED = """## One value, or refused

"only `x`": this value has no effect, and any other is refused.
"""
UNUSED = """## No effect

The option is read and changes nothing. One line names those that a command sets.
"""


def tables() -> str:
    """All tables: one for each group of translated options, then those refused and those without effect."""
    translated: dict[str, dict[str, list[str]]] = {}
    refused: dict[str, list[str]] = {}
    unused: dict[str, list[str]] = {}
    for name, option in OPTIONS.items():
        same = {f"`{name.removeprefix(f'{VERL}.')}`": f"the same without `{VERL}.`", f"`{name}`": "the same name"}
        meaning = same.get(option.describe(), option.describe())
        if meaning.startswith("no effect: "):
            rows, meaning = unused, meaning.removeprefix("no effect: ")
        elif meaning.startswith(("only", "refused")):
            rows = refused
        else:
            rows = translated.setdefault(option.section, {})
        rows.setdefault(meaning, []).append(f"`{name}`")
    titles = {title: f"`{title}`" if title[0].islower() else title for title in translated}
    parts = [f"## {titles[title]}\n\n{_table(rows)}" for title, rows in translated.items()]
    return "\n".join([*parts, f"{REFUSED}\n{_table(refused)}", f"{UNUSED}\n{_table(unused, 'Why')}"])


def _table(rows: dict[str, list[str]], heading: str = "Here") -> str:
    lines = "\n".join(f"| {', '.join(names)} | {meaning} |" for meaning, names in rows.items())
    return f"| veRL's option | {heading} |\n|---|---|\n{lines}\n"


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
