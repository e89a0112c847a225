"""Write docs/from_verl_options.md, and the tables of docs/from_trl.md: what becomes of each option of veRL's and TRL's.

python scripts/make_from_verl.py [--check]

With --check nothing is written, and exit code 1 means that a page is stale.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from verl.cli.dialects import trl_groups, trl_option
from verl.cli.rules import VERL as OPTIONS

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE, TRL_PAGE = DOCS / "from_verl_options.md", DOCS / "from_trl.md"
HEAD = """# veRL's options

What becomes of each option of a command of veRL's ([from_verl.md](from_verl.md)). Options of one meaning share a row. A
name that ends in `.*` stands for the other options of its group. Translated options come first, by group; those with
[one value](#one-value-or-refused) or [no effect](#no-effect) here follow. Written by `scripts/make_from_verl.py`.
"""
TRL_HEAD = "## Options of GRPOConfig\n"
"""Heading of docs/from_trl.md after which the page is written from the table."""
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


def trl_tables() -> str:
    """All tables of TRL's options, with the sentence before each."""
    parts = []
    for group in trl_groups():
        rows: dict[str, list[str]] = {}
        for name, text in group["rows"].items():
            option, remark = trl_option(text)
            meaning = "; ".join(part for part in (f"`{option}`" if option else "", remark) if part)
            rows.setdefault(meaning, []).append(f"`{name}`")
        parts.append(f"{group['text']}\n\n{_table(rows, theirs=group['heading'])}")
    return "\n".join(parts)


def _table(rows: dict[str, list[str]], heading: str = "Here", theirs: str = "veRL's option") -> str:
    lines = "\n".join(f"| {', '.join(names)} | {meaning} |" for meaning, names in rows.items())
    return f"| {theirs} | {heading} |\n|---|---|\n{lines}\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the tables, or check them; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if the page is stale")
    check = parser.parse_args(argv).check
    by_hand = TRL_PAGE.read_text().partition(TRL_HEAD)[0]
    pages = {PAGE: f"{HEAD}\n{tables()}", TRL_PAGE: f"{by_hand}{TRL_HEAD}\n{trl_tables()}"}
    stale = [page for page, text in pages.items() if page.read_text() != text]
    for page in stale:
        if check:
            print(f"docs/{page.name} is stale; run: python scripts/make_from_verl.py", file=sys.stderr)
        else:
            page.write_text(pages[page])
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
