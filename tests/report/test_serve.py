"""The server of the page: this machine only, the page only, a new page when the run goes on."""

import http.client
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.chromium import READY
from tests.report.example_runs import metrics_of, write_run
from verl.report import serve
from verl.report.serve import make_server

Ask = Callable[..., tuple[int, str]]


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, int]]:
    """A run's folder and the port that shows it."""
    monkeypatch.setattr(serve, "REBUILT_EVERY", 0.0)
    folder = write_run(tmp_path / "run")
    server = make_server([folder], 0)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield folder, server.server_port
    server.shutdown()
    server.server_close()
    thread.join()


def ask(port: int, path: str, host: str = "", method: str = "GET") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request(method, path, headers={"Host": host or f"127.0.0.1:{port}"})
    answer = connection.getresponse()
    found = answer.status, answer.read().decode()
    connection.close()
    return found


def go_on(folder: Path) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(metrics_of(7)) + "\n")


def test_the_page_and_its_version_alone_are_served(served: tuple[Path, int]):
    _, port = served
    code, page = ask(port, "/")
    assert code == 200 and '"steps":6,' in page and "connect-src 'self'" in page
    assert ask(port, "/version")[0] == 200
    for path in ("/metrics.jsonl", "/../config.yaml", "/samples/", "/version/../../etc/passwd"):
        assert ask(port, path)[0] == 404
    assert ask(port, "/", host=f"example.org:{port}")[0] == 403
    assert ask(port, "/", host=f"localhost:{port}")[0] == 200
    assert ask(port, "/", method="POST")[0] == 501


def test_only_this_machine_is_served(tmp_path: Path):
    server = make_server([write_run(tmp_path / "run")], 0)
    assert server.server_address[0] == "127.0.0.1"
    server.server_close()


def test_the_page_changes_when_the_run_goes_on(served: tuple[Path, int]):
    folder, port = served
    before = ask(port, "/version")
    assert ask(port, "/version") == before
    go_on(folder)
    assert ask(port, "/version") != before
    assert '"steps":7,' in ask(port, "/")[1]


@pytest.mark.slow
def test_a_browser_follows_the_run(served: tuple[Path, int], browser):
    folder, port = served
    steps = "document.querySelector('#overview-table tbody td').textContent"
    timer = threading.Timer(4, go_on, [folder])
    timer.start()
    follow = [{"value": steps}, {"until": f"{steps} === '7, not finished'"}, READY, {"value": steps}]
    values = browser(f"http://127.0.0.1:{port}/", follow)
    timer.join()
    assert values == ["6, not finished", "7, not finished"]
