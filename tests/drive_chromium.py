"""Opens a page in Chromium (Qt WebEngine) without a window, and takes the steps in standard input.

    python drive_chromium.py PAGE < steps.json

PAGE is a file, or the address of a server on this machine, which the page may then ask for more.

Steps are a JSON list: {"until": js} waits until the expression is true, {"value": js} reports its value. The output is
one JSON object: "values", "console" (messages that are warnings or errors) and "requests" (all but that for the page
itself; they are refused).
"""

import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
os.environ.setdefault("QTWEBENGINE_CHROMIUM_FLAGS", "--no-sandbox --disable-gpu")

from PyQt6.QtCore import QUrl
from PyQt6.QtWebEngineCore import QWebEnginePage, QWebEngineProfile, QWebEngineSettings, QWebEngineUrlRequestInterceptor
from PyQt6.QtWebEngineWidgets import QWebEngineView
from PyQt6.QtWidgets import QApplication

SECONDS = 60.0
"""Timeout of each step."""


class Requests(QWebEngineUrlRequestInterceptor):
    """Records and refuses every request but that for the page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.page = page
        self.refused: list[str] = []

    def interceptRequest(self, info) -> None:
        url = info.requestUrl().toString()
        if url != self.page and not (self.page.startswith("http") and url.startswith(self.page)):
            self.refused.append(url)
            info.block(True)


class Page(QWebEnginePage):
    """A page whose warnings and errors are kept."""

    def __init__(self, profile: QWebEngineProfile) -> None:
        super().__init__(profile)
        self.messages: list[str] = []

    def javaScriptConsoleMessage(self, level, message, line, source) -> None:
        if level != QWebEnginePage.JavaScriptConsoleMessageLevel.InfoMessageLevel:
            self.messages.append(f"{source}:{line}: {message}")


def wait(app: QApplication, done, what: str) -> None:
    end = time.monotonic() + SECONDS
    while not done():
        app.processEvents()
        time.sleep(0.005)
        if time.monotonic() > end:
            raise SystemExit(f"drive_chromium.py: nothing after {SECONDS:.0f} s: {what}")


def evaluate(app: QApplication, page: QWebEnginePage, expression: str) -> object:
    found: list[object] = []
    # Through JSON, so that undefined or a DOM node differs from no answer.
    page.runJavaScript(f"JSON.stringify({{value: {expression}}})", found.append)
    wait(app, lambda: found, expression)
    return json.loads(found[0]).get("value") if found[0] else None


def main() -> None:
    steps = json.load(sys.stdin)
    app = QApplication(sys.argv[:1])
    place = sys.argv[1]
    url = QUrl(place) if place.startswith("http://") else QUrl.fromLocalFile(str(Path(place).resolve()))
    profile = QWebEngineProfile()
    requests = Requests(url.toString())
    profile.setUrlRequestInterceptor(requests)
    page = Page(profile)
    # Otherwise Chromium itself would stop a local page before its requests are recorded.
    page.settings().setAttribute(QWebEngineSettings.WebAttribute.LocalContentCanAccessRemoteUrls, True)
    view = QWebEngineView()
    view.setPage(page)
    view.resize(1280, 900)
    view.show()
    loaded: list[bool] = []
    page.loadFinished.connect(loaded.append)
    page.load(url)
    wait(app, lambda: loaded, "loading the page")
    values = []
    for step in steps:
        if "until" in step:
            wait(app, lambda js=step["until"]: evaluate(app, page, js) is True, step["until"])
        else:
            values.append(evaluate(app, page, step["value"]))
    print(json.dumps({"loaded": loaded[0], "values": values, "console": page.messages, "requests": requests.refused}))
    sys.stdout.flush()
    # Qt's own shutdown takes seconds and may crash.
    os._exit(0)


if __name__ == "__main__":
    main()
