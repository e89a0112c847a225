"""Where the examples come from: a code block of docs/extending.md whose first line is ``# my/NAME.py`` is that file."""

from pathlib import Path

from tests.kit import documented, user_code


def example(folder: Path, name: str) -> Path:
    """Write the example ``name`` into ``folder``/my and return its path."""
    (folder / "my").mkdir(exist_ok=True)
    return Path(user_code(folder / "my", documented("extending", f"my/{name}"), name))
