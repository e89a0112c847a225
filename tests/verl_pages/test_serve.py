"""The server of the page: this machine only, the page only, a new page when the run goes on."""

import http.client
import json
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path

import pytest

from tests.chromium import READY, press, until, value
from tests.verl_pages.example_runs import metrics_of, write_run
from verl_pages import serve
from verl_pages.serve import LivePage, Server, make_server


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Server]]:
    """A run's folder and the server that shows it."""
    monkeypatch.setattr(serve, "REBUILT_EVERY", 0.0)
    folder = write_run(tmp_path / "run")
    server = make_server([folder], 0)
    assert server.server_address[0] == "127.0.0.1"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield folder, server
    server.shutdown()
    server.server_close()
    thread.join()


def ask(server: Server, path: str, host: str = "", method: str = "GET") -> tuple[int, str]:
    port = server.server_port
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request(method, path, headers={"Host": host or f"127.0.0.1:{port}"})
    answer = connection.getresponse()
    found = answer.status, answer.read().decode()
    connection.close()
    return found


def go_on(folder: Path) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(metrics_of(7)) + "\n")


def test_the_page_and_its_version_alone_are_served(served: tuple[Path, Server], capfd: pytest.CaptureFixture[str]):
    _, server = served
    port, home = server.server_port, server.path
    code, page = ask(server, home)
    assert code == 200 and '"steps":6,' in page and "connect-src 'self'" in page
    assert ask(server, f"{home}version")[0] == 200
    for path in ("metrics.jsonl", "../config.yaml", "samples/", "version/../../etc/passwd"):
        assert ask(server, f"{home}{path}")[0] == 404
    assert ask(server, home, host=f"example.org:{port}")[0] == 403
    assert ask(server, home, host=f"localhost:{port}")[0] == 200
    assert ask(server, home, method="POST")[0] == 501
    # Another account of this machine, which knows the port alone.
    for path in ("/", "/version", "/%s/version" % ("A" * 32), home.rstrip("/"), home[:-2] + "/"):
        assert ask(server, path)[0] == 404
    assert server.url == f"http://127.0.0.1:{port}{home}" and len(home) == 34
    # A browser that goes away before the end of an answer is not worth a line.
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            # Closing with unread data resets the connection.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.sendall(b"GET / HTTP/1.0\r\nHost: 127.0.0.1:%d\r\n" % port)
    assert ask(server, home)[0] == 200 and capfd.readouterr().err == ""


def test_half_sent_requests_are_bounded(served: tuple[Path, Server], monkeypatch: pytest.MonkeyPatch):
    _, server = served
    before = threading.active_count()
    with ExitStack() as opened:
        half = [opened.enter_context(socket.create_connection(server.server_address)) for _ in range(100)]  # type: ignore[arg-type]
        for connection in half:
            connection.settimeout(30)
            with suppress(OSError):  # closed already
                connection.sendall(b"GET / HTTP/1.0\r\n")
        assert threading.active_count() - before <= serve.MAX_CONNECTIONS
        monkeypatch.setattr(serve, "LONGEST_REQUEST_S", 0.0)
        for connection in half:
            with suppress(ConnectionResetError):
                assert connection.recv(1) == b""
    monkeypatch.undo()
    assert ask(server, server.path)[0] == 200


def test_page_follows_the_run(served: tuple[Path, Server]):
    folder, server = served
    home, version_path = server.path, f"{server.path}version"
    page, version = ask(server, home), ask(server, version_path)
    assert ask(server, version_path) == version
    folder.rename(folder.with_name("moved"))
    assert ask(server, home) == page and page[0] == 200
    folder.with_name("moved").rename(folder)
    go_on(folder)
    assert ask(server, version_path) != version and '"steps":7,' in ask(server, home)[1]


@pytest.mark.slow
def test_a_browser_follows_the_run(served: tuple[Path, Server], browser, monkeypatch: pytest.MonkeyPatch):
    folder, server = served
    asked = count(1)
    version = LivePage.version

    def counted(page: LivePage) -> str:
        # The page asks every three seconds: what is chosen below is chosen by then.
        if next(asked) == 3:
            go_on(folder)
        return version(page)

    monkeypatch.setattr(LivePage, "version", counted)
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
        until(f"{steps} === '7, not finished'"),
        READY,
        until(f"{heading} === window.name && {smoothing}?.value === '5'"),
        until(f"{samples}?.getBoundingClientRect().top < 200"),
    ]
    assert browser(server.url, follow)[0] == "6, not finished"
