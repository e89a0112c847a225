"""Where the examples come from: a code block of docs/extending.md whose first line is ``# my/NAME.py`` is that file."""

import re
from pathlib import Path

from conftest import ROOT

BLOCK = re.compile(r"^```python\n(# my/(?P<name>\w+\.py)\n.*?)^```$", re.DOTALL | re.MULTILINE)


def example(folder: Path, name: str) -> Path:
    """Write the example ``name`` into ``folder``/my and return its path."""
    page = (ROOT / "docs/extending.md").read_text()
    sources = {block["name"]: block[1] for block in BLOCK.finditer(page)}
    file = folder / "my" / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(sources[name])
    return file
