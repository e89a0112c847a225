"""Build the site of the documentation into build/site: ``make site``.

Pages lie below build/pages as they do in the repository, with the files that they link to, so that one text serves a
reader of the repository and of the site. Notebooks become pages. A broken link is an error.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "build" / "pages"
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def page_paths() -> list[Path]:
    """Markdown files of the repository that are read by people, relative to it."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [Path(line) for line in listed.stdout.splitlines() if not line.startswith("tests/")]


def linked_files(page: Path) -> list[Path]:
    """Files other than pages that ``page`` links to, relative to the repository."""
    targets = [ROOT / page.parent / link for link in LINK.findall((ROOT / page).read_text()) if "://" not in link]
    files = [target.resolve() for target in targets if target.is_file() and target.suffix != ".md"]
    return [file.relative_to(ROOT) for file in files if file.is_relative_to(ROOT)]


def notebook_page(path: Path) -> str:
    """Return the cells of a notebook and their outputs as Markdown."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        parts += map(output, cell.get("outputs", []))
    return "\n\n".join(parts)


def output(shown: dict[str, Any]) -> str:
    """Return an output of a notebook's cell, a picture or a text, as Markdown."""
    data = shown.get("data", {"text/plain": shown.get("text", "")})
    if "image/png" in data:
        return f"![](data:image/png;base64,{''.join(data['image/png'].split())})"
    return f"```text\n{''.join(data['text/plain']).rstrip()}\n```"


def lay_out() -> None:
    """Copy pages and the files that they link to below ``PAGES``."""
    shutil.rmtree(PAGES, ignore_errors=True)
    pages = page_paths()
    for path in {*pages, *(file for page in pages for file in linked_files(page))}:
        (PAGES / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, PAGES / path)
    for notebook in (ROOT / "docs").glob("*.ipynb"):
        (PAGES / "docs" / notebook.name).with_suffix(".md").write_text(notebook_page(notebook))
    shutil.copytree(ROOT / "docs" / "site", PAGES / "docs" / "site")
    shutil.copytree(ROOT / "verl_pages" / "assets" / "katex", PAGES / "docs" / "site" / "katex")


if __name__ == "__main__":
    lay_out()
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    # The theme would announce its successor.
    sys.exit(subprocess.run(command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}).returncode)
