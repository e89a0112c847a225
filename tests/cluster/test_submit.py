"""What ``scripts/cluster.sh`` says when a job cannot be submitted to a cluster, or is lost."""

import json
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
import ray

from verl.cluster import submit

ANSWERS: dict[str, tuple[int, str]] = {}
"""Path -> status and text that the cluster's head answers with."""

KNOWN = {"/api/version": (200, json.dumps({"version": "4", "ray_version": ray.__version__, "ray_commit": ""}))}
TRACEBACK = "Traceback (most recent call last):\n" + "  File\n" * 60


class Head(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        status, text = ANSWERS.get(self.path, (404, "nothing"))
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def address() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Head) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        (None, "no job can be submitted there: "),
        ({"/api/version": (200, "<html>")}, "no job can be submitted there: "),
        ({"/api/version": (500, TRACEBACK)}, "no job can be submitted there: 500 Server Error"),
        ({"/api/version": (401, "no")}, "no job can be submitted there: "),
        (
            {**KNOWN, "/api/jobs/": (500, TRACEBACK)},
            "no job can be submitted there: Request failed with status code 500",
        ),
        ({**KNOWN, "/api/jobs/": (200, "{}")}, "no job can be submitted there: "),
        (
            {**KNOWN, "/api/jobs/": (200, '{"job_id": "a", "submission_id": "a"}')},
            "lost sight of a, which may still run: ",
        ),
    ],
    ids=["nothing listens", "no Ray", "version", "token", "refused", "no answer", "lost"],
)
def test_an_error_is_one_line(
    address: str, answers: dict[str, tuple[int, str]] | None, said: str, monkeypatch: pytest.MonkeyPatch
):
    address = address if answers is not None else "http://127.0.0.1:1"
    monkeypatch.setattr(sys, "argv", ["submit", address, "/folder", "train.sh"])
    for path, answer in (answers or {}).items():
        monkeypatch.setitem(ANSWERS, path, answer)
    with pytest.raises(SystemExit) as ended:
        submit.main()
    line = str(ended.value)
    assert line.startswith(f"error: RAY_ADDRESS={address}: {said}")
    assert "\n" not in line and len(line) < 500
