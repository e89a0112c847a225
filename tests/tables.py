"""Cases of parametrised tests in text files: one on each line, its cells separated by ``->``, with ``#`` comments."""

from pathlib import Path

TESTS = Path(__file__).parent


def cases(file: str) -> list[tuple[str, ...]]:
    """The cells of each line of a file below this folder."""
    lines = (TESTS / file).read_text().splitlines()
    return [tuple(cell.strip() for cell in line.split(" ->")) for line in lines if line and not line.startswith("#")]
