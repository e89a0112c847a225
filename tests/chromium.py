"""Pages read from their text, and in a real browser: fixtures that open one and take steps there, and those steps."""

import base64
import importlib.util
import json
import subprocess
import sys
import zlib
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

DRIVER = Path(__file__).with_name("drive_chromium.py")
READY = {"until": "document.documentElement?.hasAttribute('data-ready')"}


class PageText(HTMLParser):
    """The elements of a page, and the data in its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.scripts: dict[str, str] = {}
        self._script: str | None = None
        self.feed(text)
        self.index = json.loads(self.scripts["data"])

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attributes
        self._script = dict(attributes).get("id", "") if tag == "script" else None

    def handle_endtag(self, tag: str) -> None:
        self._script = None

    def handle_data(self, text: str) -> None:
        if self._script is not None:
            self.scripts[self._script] = self.scripts.get(self._script, "") + text

    def chunk(self, number: int) -> Any:
        return json.loads(zlib.decompress(base64.b64decode(self.scripts[f"chunk-{number}"])))


def shows(expression: str, text: str) -> dict:
    """Wait until an expression is a text that starts so."""
    return {"until": f"{expression}.startsWith({json.dumps(text)})"}


def press(key: str, target: str = "document.body") -> dict:
    event = f"new KeyboardEvent('keydown', {{key: {json.dumps(key)}, bubbles: true, cancelable: true}})"
    return {"value": f"{target}.dispatchEvent({event})"}


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, list[dict]], dict]:
    """Opens a page in Chromium, takes steps there and returns what drive_chromium.py says; skips without a browser."""
    if importlib.util.find_spec("PyQt6") is None or importlib.util.find_spec("PyQt6.QtWebEngineCore") is None:
        pytest.skip("no browser: PyQt6-WebEngine is not installed (pip install -r requirements/dev.txt)")
    folder = tmp_path_factory.mktemp("pages")

    def start(page: str, steps: list[dict]) -> subprocess.CompletedProcess:
        path = folder / "page.html"
        if not page.startswith("http://"):
            path.write_text(page, encoding="utf-8")
        command = [sys.executable, DRIVER, page if page.startswith("http://") else path]
        return subprocess.run(command, input=json.dumps(steps), capture_output=True, text=True, timeout=300)

    def visit(page: str, steps: list[dict]) -> dict:
        done = start(page, steps)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    trial = start("<!doctype html><title>t</title><p>", [{"value": "document.title"}])
    if trial.returncode != 0:
        # It needs libraries of a desktop (libnss3, libxkbcommon0, libegl1, ...) that a server may lack.
        pytest.skip(f"no browser: Chromium does not start here: {trial.stderr.strip().splitlines()[-1:]}")
    return visit


@pytest.fixture
def browser(chromium: Callable[[str, list[dict]], dict]) -> Callable[[str, list[dict]], list]:
    """Opens a page of ours, takes steps there and returns their values; there are no errors and no requests."""

    def run(page: str, steps: list[dict]) -> list:
        said = chromium(page, [READY, *steps])
        assert said["loaded"] and said["console"] == [] and said["requests"] == []
        return said["values"]

    return run
