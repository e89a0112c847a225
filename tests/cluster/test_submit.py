"""What ``scripts/cluster.sh`` says when a job cannot be submitted to a cluster, or is lost."""

import sys
from http.server import BaseHTTPRequestHandler

import pytest
import ray

from tests.kit import served
from verl.cluster import submit

KNOWN = {"/api/version": (200, {"version": "4", "ray_version": ray.__version__, "ray_commit": ""})}
REFUSED = "no job can be submitted there: "
TRACEBACK = b"Traceback (most recent call last):\n" + b"  File\n" * 60


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        (None, REFUSED),
        ({"/api/version": (200, b"<html>")}, REFUSED),
        ({"/api/version": (500, TRACEBACK)}, f"{REFUSED}500 Server Error"),
        ({"/api/version": (401, b"no")}, REFUSED),
        (KNOWN | {"/api/jobs/": (500, TRACEBACK)}, f"{REFUSED}Request failed with status code 500"),
        (KNOWN | {"/api/jobs/": (200, {})}, REFUSED),
        (
            KNOWN | {"/api/jobs/": (200, {"job_id": "a", "submission_id": "a"})},
            "lost sight of a, which may still run: ",
        ),
    ],
    ids=["nothing listens", "no Ray", "version", "token", "refused", "no answer", "lost"],
)
def test_an_error_is_one_line(answers: dict | None, said: str, monkeypatch: pytest.MonkeyPatch):
    def answer(request: BaseHTTPRequestHandler, body: bytes) -> tuple[int, object]:
        return (answers or {}).get(request.path, (404, b"nothing"))

    with served(answer) as address:
        address = address if answers is not None else "http://127.0.0.1:1"
        monkeypatch.setattr(sys, "argv", ["submit", address, "/folder", "train.sh"])
        with pytest.raises(SystemExit) as ended:
            submit.main()
    line = str(ended.value)
    assert line.startswith(f"error: RAY_ADDRESS={address}: {said}")
    assert "\n" not in line and len(line) < 500
