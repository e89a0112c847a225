"""The site of the documentation as a reader opens it from the disk, in a window 1280 pixels wide."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.chromium import until, value

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site() -> Path:
    built = subprocess.run([sys.executable, "scripts/make_site.py"], cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return ROOT / "build" / "site"


def test_search_and_formulas_work_from_disk(site: Path, chromium):
    query = "document.querySelector('[data-md-component=search-query]')"
    typed = "".join(f"{query}.dispatchEvent(new Event('{kind}'));" for kind in ("focus", "keyup", "input"))
    steps = [
        until("document.readyState === 'complete'"),
        value("document.querySelectorAll('.arithmatex').length"),
        value("document.querySelectorAll('.arithmatex:not(:has(.katex))').length"),
        value(f"((q) => {{ q.focus(); q.value = 'effective rank'; {typed} }})({query})"),
        until("document.querySelectorAll('.md-search-result__item a').length > 3"),
    ]
    said = chromium(str(site / "docs" / "method.html"), steps, site)
    formulas, unset, _ = said["values"]
    assert formulas > 20 and unset == 0
    assert said["console"] == [] and said["requests"] == []


@pytest.mark.parametrize("page", ["index", "docs/extending"])
def test_code_is_not_cut(site: Path, chromium, page: str):
    blocks = "[...document.querySelectorAll('pre code')]"
    steps = [
        until("document.readyState === 'complete'"),
        value(f"{blocks}.length"),
        value(f"{blocks}.filter((one) => one.scrollWidth > one.clientWidth).map((one) => one.textContent)"),
    ]
    num_blocks, cut = chromium(str(site / f"{page}.html"), steps, site)["values"]
    assert num_blocks > 0 and cut == []
