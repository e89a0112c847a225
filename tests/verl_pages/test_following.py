"""The page of a run that trains reloads itself in a browser, and keeps what the reader has chosen."""

import json
import os
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.chromium import READY, press, until, value
from tests.verl_pages.example_runs import metrics_of, write_run
from verl_pages import PAGE, html
from verl_pages.run import make_page, write_page


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    """The address of a plain file server over ``tmp_path``."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=tmp_path)) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_only_a_recent_unfinished_page_follows(tmp_path: Path):
    folder = write_run(tmp_path / "run")
    assert '"written":' in make_page([folder])[0]
    (folder / "summary.json").write_text('{"steps": 6}')
    text = make_page([folder])[0]
    assert '"written":' not in text and "location.reload" not in text and "connect-src 'none'" in text


WAIT = "Math.max(RELOADED_S * 1000, 20 * performance.now())"


@pytest.mark.slow
@pytest.mark.parametrize("opened_from", ["a file", "a server"])
def test_a_browser_follows_the_run(tmp_path: Path, served: str, browser, opened_from: str, monkeypatch):
    read = html._read
    monkeypatch.setattr(html, "_read", lambda names, kind: read(names, kind).replace(WAIT, "5000"))
    assert WAIT in read(["follow"], "js")
    folder = write_run(tmp_path / "run")
    page = folder / PAGE
    write_page([folder], page)
    os.utime(page, (page.stat().st_mtime - 60,) * 2)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(metrics_of(7)) + "\n")
    # While the page reloads, a part of it may be missing.
    steps = "document.querySelector('#overview-table tbody td')?.textContent"
    heading, smoothing = "document.querySelector('#detail h3')?.textContent", "document.getElementById('smoothing')"
    samples = "document.getElementById('samples')"
    follow = [
        value(steps),
        value(f"(window.name = {heading}, {smoothing}.value = '5', 0)"),
        press("j"),
        until(f"{heading} !== window.name"),
        # A window keeps its name.
        value(f"window.name = {heading}"),
        value(f"{samples}.scrollIntoView({{behavior: 'instant'}})"),
        {"write": [str(page), make_page([folder])[0]]},
        until(f"{steps} === '7, not finished'"),
        READY,
        until(f"{heading} === window.name && {smoothing}?.value === '5'"),
        until(f"{samples}?.getBoundingClientRect().top < 200"),
    ]
    address = str(page) if opened_from == "a file" else f"{served}/run/{PAGE}"
    assert browser(address, follow)[0] == "6, not finished"
