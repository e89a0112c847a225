"""Pages read from their text, and in a real browser.

As a script, ``python chromium.py PAGE [FOLDER] < steps.json`` opens a page, or the address of a server on this machine,
in Chromium (Qt WebEngine) without a window and takes the steps: {"until": js} waits until the expression is true,
{"value": js} reports its value, {"write": [path, text]} replaces a file. It prints one JSON object: "loaded",
"values", "console" (warnings and errors) and "requests" (all but those to the page's own server, or to files in FOLDER;
they are refused).
"""

import base64
import importlib.util
import json
import os
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from verl.utils.files import replace_text
from verl_pages.html import ASSETS

KATEX = (ASSETS / "katex" / "katex.min.js").read_text()

SECONDS = 60.0
"""Timeout of each step."""


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

    def check_inert(self) -> None:
        """Nothing is loaded, and no text can become markup or code."""
        assert not {"link", "img", "iframe", "object", "embed", "base"} & set(self.tags)
        assert not {"src", "srcset", "data", "action"} & {name for name, _ in self.attributes}
        assert all(link.startswith("#") for name, link in self.attributes if name == "href")
        assert self.scripts["data"].isascii() and not set("<>&") & set(self.scripts["data"])
        # KaTeX's parser has a method `fetch`; a page that follows its run asks for its own address.
        text = self.text.replace(KATEX, "").replace("fetch(location.href,", "")
        for words in ("url(", "@import", "fetch(", "innerHTML", "eval(", "insertAdjacent"):
            assert words not in text

    def chunk(self, number: int) -> Any:
        return json.loads(zlib.decompress(base64.b64decode(self.scripts[f"chunk-{number}"])))

    @property
    def entries(self) -> Any:
        """The list of prompts."""
        return self.chunk(self.index["samples"]["list"])

    def record(self, place: int) -> Any:
        """A prompt of the list in full."""
        *_, number, offset = self.entries[place]
        return self.chunk(number)[offset]


def value(expression: str) -> dict:
    return {"value": expression}


def until(condition: str) -> dict:
    return {"until": condition}


def shows(expression: str, text: str) -> dict:
    """Wait until an expression is a text that starts so."""
    return until(f"{expression}.startsWith({json.dumps(text)})")


def press(key: str, target: str = "document.body") -> dict:
    event = f"new KeyboardEvent('keydown', {{key: {json.dumps(key)}, bubbles: true, cancelable: true}})"
    return value(f"{target}.dispatchEvent({event})")


def choose(name: str, chosen: str) -> dict:
    """Set a field as a user does."""
    field = f"document.getElementById('{name}')"
    event = "new Event('input', {bubbles: true})"
    return value(f"({field}.value = {json.dumps(chosen)}, {field}.dispatchEvent({event}))")


READY = until("document.documentElement?.hasAttribute('data-ready')")


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, list[dict]], dict]:
    """Opens a page (its text, path or address) in Chromium, takes steps there and returns what the script prints.

    Skips without a browser.
    """
    if importlib.util.find_spec("PyQt6") is None or importlib.util.find_spec("PyQt6.QtWebEngineCore") is None:
        pytest.skip("no browser: PyQt6-WebEngine is not installed (pip install -r requirements/dev.txt)")
    path = tmp_path_factory.mktemp("pages") / "page.html"

    def start(page: str, steps: list[dict], *folder: Path) -> subprocess.CompletedProcess:
        is_text = page.startswith("<")
        if is_text:
            path.write_text(page, encoding="utf-8")
        command = [sys.executable, __file__, path if is_text else page, *folder]
        return subprocess.run(command, input=json.dumps(steps), capture_output=True, text=True, timeout=300)

    def visit(page: str, steps: list[dict], *folder: Path) -> dict:
        done = start(page, steps, *folder)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    trial = start("<!doctype html><title>t</title><p>", [value("document.title")])
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


def main() -> None:
    os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
    os.environ.setdefault("QTWEBENGINE_CHROMIUM_FLAGS", "--no-sandbox --disable-gpu")
    from PyQt6.QtCore import QUrl
    from PyQt6.QtWebEngineCore import (
        QWebEnginePage,
        QWebEngineProfile,
        QWebEngineSettings,
        QWebEngineUrlRequestInterceptor,
    )
    from PyQt6.QtWebEngineWidgets import QWebEngineView
    from PyQt6.QtWidgets import QApplication

    refused: list[str] = []
    messages: list[str] = []

    class Requests(QWebEngineUrlRequestInterceptor):
        """Records and refuses every request but those for the page."""

        def interceptRequest(self, info) -> None:
            asked = info.requestUrl().toString()
            if asked != url.toString() and not (home and asked.startswith(home)):
                refused.append(asked)
                info.block(True)

    class Page(QWebEnginePage):
        def javaScriptConsoleMessage(self, level, message, line, source) -> None:
            if level != QWebEnginePage.JavaScriptConsoleMessageLevel.InfoMessageLevel:
                messages.append(f"{source}:{line}: {message}")

    def wait(done: Callable[[], object], what: str) -> None:
        end = time.monotonic() + SECONDS
        while not done():
            app.processEvents()
            time.sleep(0.005)
            if time.monotonic() > end:
                raise SystemExit(f"chromium.py: nothing after {SECONDS:.0f} s: {what}")

    def evaluate(expression: str) -> object:
        found: list[str] = []
        # Through JSON, so that undefined or a DOM node differs from no answer.
        page.runJavaScript(f"JSON.stringify({{value: {expression}}})", found.append)
        wait(lambda: found, expression)
        return json.loads(found[0]).get("value") if found[0] else None

    steps, place = json.load(sys.stdin), sys.argv[1]
    served = place.startswith("http://")
    app = QApplication(sys.argv[:1])
    url = QUrl(place) if served else QUrl.fromLocalFile(str(Path(place).resolve()))
    folder = QUrl.fromLocalFile(str(Path(sys.argv[2]).resolve())).toString() + "/" if len(sys.argv) > 2 else ""
    home = url.toString() if served else folder
    profile, requests = QWebEngineProfile(), Requests()
    profile.setUrlRequestInterceptor(requests)
    page, view = Page(profile), QWebEngineView()
    # Otherwise Chromium itself would stop a local page before its requests are recorded.
    page.settings().setAttribute(QWebEngineSettings.WebAttribute.LocalContentCanAccessRemoteUrls, True)
    view.setPage(page)
    view.resize(1280, 900)
    view.show()
    loaded: list[bool] = []
    page.loadFinished.connect(loaded.append)
    page.load(url)
    wait(lambda: loaded, "loading the page")
    values = []
    for step in steps:
        if "until" in step:
            wait(lambda js=step["until"]: evaluate(js) is True, step["until"])
        elif "write" in step:
            replace_text(Path(step["write"][0]), step["write"][1])
        else:
            values.append(evaluate(step["value"]))
    print(json.dumps({"loaded": loaded[0], "values": values, "console": messages, "requests": refused}), flush=True)
    # Qt's own shutdown takes seconds and may crash.
    os._exit(0)


if __name__ == "__main__":
    main()
