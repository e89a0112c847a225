"""The endpoint over HTTP: who is answered, and what hostile clients cost."""

import asyncio
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.kit import refused
from verl.rollout.agents import endpoint as module
from verl.rollout.agents.completions import text_completion
from verl.rollout.agents.endpoint import Endpoint
from verl.rollout.agents.protocol import ProtocolError, completion

pytestmark = pytest.mark.slow

BODY = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
def server() -> Iterator[Endpoint]:
    server = Endpoint("127.0.0.1")
    yield server
    server.close()


def answer(server: Endpoint) -> threading.Thread:
    """Answer every request with its session's number."""

    def run() -> None:
        while True:
            event = server.events.get()
            if event is None:
                return
            message = {"role": "assistant", "content": str(event.session)}
            event.reply.set_result(completion("0", message, "stop", (1, 1), None))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def post(url: str, body: Any, timeout: float = 20) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data), timeout=timeout) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(
                error.read() or b"null"
            ) if error.headers.get_content_subtype() == "json" else None


def test_sessions_are_told_apart_by_their_addresses(server):
    urls = server.open([0, 1])
    answer(server)
    for number, url in urls.items():
        status, body = post(f"{url}/chat/completions", BODY)
        assert status == 200 and body["choices"][0]["message"]["content"] == str(number)
    server.close_session(1)
    status, body = post(f"{urls[1]}/chat/completions", BODY)
    assert status == 404 and body["error"]["code"] == "no_session"


def test_a_late_body_reaches_no_session_of_a_later_step(server):
    url = server.open([0])[0]
    body = json.dumps(BODY).encode()
    head = f"POST {url.removeprefix(server.origin)}/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}"
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as late:
        late.sendall(f"{head}\r\n\r\n".encode())
        time.sleep(0.2)
        server.open([0])
        late.sendall(body)
        assert b" 404 " in late.recv(1000).splitlines()[0]
    assert server.events.empty()


def test_nothing_else_answers(server):
    url = server.open([0])[0]
    key = url.split("/")[3]
    assert len(key) >= 32
    for path in ("/v1/chat/completions", "/x/v1/chat/completions", f"/{key}x/v1/chat/completions", f"/{key}", "/"):
        assert post(f"{server.origin}{path}", BODY)[0] in (404, 405)
    assert server.events.empty()


def test_completions_are_answered(server):
    url = server.open([7])[7]
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(post, f"{url}/completions", {"prompt": [5, 6]})
        event = server.events.get(timeout=20)
        assert (event.session, event.request.prompt) == (7, [5, 6])
        event.reply.set_result(text_completion("0", "7", "stop", [5, 6], [8], None))
        assert waiting.result()[1]["choices"][0]["token_ids"] == [8]
    assert post(f"{url}/completions", BODY)[0] == 400


def test_models_and_streams_are_answered(server):
    url = server.open([7])[7]
    answer(server)
    with urllib.request.urlopen(f"{url}/models", timeout=20) as reply:
        assert json.load(reply)["data"][0]["id"] == "policy"
    request = urllib.request.Request(f"{url}/chat/completions", json.dumps(BODY | {"stream": True}).encode())
    with urllib.request.urlopen(request, timeout=20) as reply:
        lines = reply.read().decode().split("\n\n")
    assert json.loads(lines[0].removeprefix("data: "))["choices"][0]["delta"]["content"] == "7"
    assert lines[-2] == "data: [DONE]"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"[" * 100_000, 400),
        (b"\xff\xfe", 400),
        (b"5", 400),
        (json.dumps(BODY | {"n": 3}).encode(), 400),
        (b" " * (module.MAX_BODY_BYTES + 1), 413),
    ],
)
def test_bad_bodies_cost_their_own_request(server, body, status):
    url = server.open([0])[0]
    assert post(f"{url}/chat/completions", body)[0] == status
    answer(server)
    assert post(f"{url}/chat/completions", BODY)[0] == 200


def test_slow_bodies_and_many_sockets_stop_nobody(server, monkeypatch):
    monkeypatch.setattr(module, "BODY_TIMEOUT_S", 0.5)
    url = server.open([0])[0]
    answer(server)
    path = url.removeprefix(server.origin)
    head = f"POST {path}/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{".encode()
    sockets = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(200)]
    try:
        for each in sockets[:20]:
            each.sendall(head)
        assert post(f"{url}/chat/completions", BODY)[0] == 200
        sockets[0].settimeout(20)
        assert b" 408 " in sockets[0].recv(1000).splitlines()[0]
    finally:
        for each in sockets:
            each.close()


def test_one_session_cannot_fill_the_server(server, monkeypatch):
    monkeypatch.setattr(module, "MAX_PENDING", 2)
    urls = server.open([0, 1])
    with ThreadPoolExecutor(4) as threads:
        waiting = [threads.submit(post, f"{urls[0]}/chat/completions", BODY) for _ in range(2)]
        held = [server.events.get(timeout=20) for _ in waiting]
        assert post(f"{urls[0]}/chat/completions", BODY)[0] == 429
        for event in held:
            event.reply.set_exception(ProtocolError(400, "turn_limit", "enough"))
        assert [each.result()[1]["error"]["message"] for each in waiting] == ["enough"] * 2


def test_requests_end_with_the_server():
    """Requests of disconnected clients are cancelled, too."""
    server = Endpoint("127.0.0.1")
    path, body = server.open([0])[0].removeprefix(server.origin), json.dumps(BODY).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        head = f"POST {path}/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        server.events.get(timeout=20)
    time.sleep(0.2)
    server.close()
    assert not [task for task in asyncio.all_tasks(server._loop) if not task.done()]


def test_an_address_that_is_not_this_machines_is_refused():
    with refused("rollout.multi_turn.agent.address='192.0.2.1': ...; name an address of this machine"):
        Endpoint("192.0.2.1")
