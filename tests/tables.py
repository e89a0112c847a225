"""Cases of parametrised tests in text files: one on each line, its cells separated by ``->``, with ``#`` comments."""

import re
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent


def cases(file: str, section: str = "") -> list[tuple[str, ...]]:
    """Return the cells of each line of a file below this folder, or of the lines below its ``[section]``."""
    rows: dict[str, list[tuple[str, ...]]] = {}
    current = rows.setdefault("", [])
    for line in (TESTS / file).read_text().splitlines():
        if section_name := re.fullmatch(r"\[([a-z_ ]+)\]", line):  # unlike a case such as [1]
            current = rows.setdefault(section_name[1], [])
        elif line and not line.startswith("#"):
            current.append(tuple(cell.strip() for cell in line.split(" ->")))
    return rows[section]


def refusals(file: str, section: str = "") -> list[Any]:
    """Return the same as parameters of a test that are named for all cells but the last, the line of the error."""
    return [pytest.param(*cells, id=" ".join(cells[:-1])) for cells in cases(file, section)]
