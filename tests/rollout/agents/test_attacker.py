"""Another account of the machine against the sessions of running agents."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.kit import user_code
from tests.rollout.agents.test_agent_pool import AGENTS, options, records
from verl.rollout.agents.endpoint import Asked, Ended
from verl.rollout.agents.pool import AgentPool
from verl.rollout.agents.protocol import completion

ATTACKER = """
import http.client, json, os, pathlib, secrets, socket, sys, tempfile
port, folders = int(sys.argv[1]), [*sys.argv[2:], tempfile.gettempdir(), "/dev/shm", "/var/tmp"]
http.client.HTTPConnection("127.0.0.1", port).connect()  # imports what resolves names
told = json.loads(sys.stdin.readline())
os.setgroups([]), os.setgid(65534), os.setuid(65534)

def read(path):
    try:
        with open(path, "rb") as file:
            return file.read(1 << 20).decode(errors="replace")
    except OSError:
        return ""

def link(path):
    try:
        return os.readlink(path)
    except OSError:
        return ""

# 1. All that this account may read of processes and files is searched for the secrets, which it was told for that.
def texts():
    yield read(pathlib.Path("/proc/net/tcp")) + read(pathlib.Path("/proc/net/unix"))
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        names = ("cmdline", "environ", "status", "maps", "stack", "mountinfo", "task/%s/comm" % process.name)
        yield "\\n".join([*(read(process / name) for name in names), *map(link, process.glob("fd/*"))])
    left = 5000
    for folder in folders:
        for place, below, files in os.walk(folder):
            below[:] = below[: 50 if len(pathlib.Path(place).relative_to(folder).parts) < 3 else 0]
            yield "\\n".join([place, *below, *files])
            for file in files[: min(50, left)]:
                left -= 1
                yield read(pathlib.Path(place, file))

leaks, size = [], 0
for text in texts():
    size += len(text)
    leaks += [text[:200] for secret in told if secret in text]
print("SEEN", json.dumps([size, leaks]))

# 2. Requests without a session's address, and guesses.
def status(method, path, body="{}"):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request(method, path, body, {"Authorization": "Bearer " + secrets.token_urlsafe(24)})
    return connection.getresponse().status

body = json.dumps({"messages": [{"role": "user", "content": "give me a turn"}]})
routes = ("v1/chat/completions", "v1/responses", "v1/completions", "v1/models")
found = {status("GET", "/" + route) for route in routes} | {status("POST", "/" + route, body) for route in routes}
for guess in ["", ".", "%2e%2e", "*", "0", "None", "a" * 4000, *(secrets.token_urlsafe(24) for _ in range(300))]:
    found.add(status("POST", "/" + guess + "/v1/chat/completions", body))
    found.add(status("POST", "/" + guess, "[[0, 1.0, '']]"))

# 3. A thousand open sockets, half of them in the middle of a request, while a session goes on.
head = b"POST /x/v1/chat/completions HTTP/1.1\\r\\nHost: x\\r\\nContent-Length: 100000000\\r\\n\\r\\n{"
held = []
for number in range(1000):
    held.append(socket.create_connection(("127.0.0.1", port), timeout=30))
    if number % 2:
        held[-1].sendall(head)
print("STATUSES", json.dumps(sorted(found)), flush=True)
sys.stdin.readline()
"""

AGENT = AGENTS + (
    "\nif __name__ == '__main__':\n    first = ask(os.environ['OPENAI_BASE_URL'])\n"
    "    print(json.dumps({'reward': float(first) + float(ask(os.environ['OPENAI_BASE_URL']))}))\n"
)


@pytest.mark.slow
def test_another_account_reaches_no_session(small_config, tmp_path: Path):
    if os.geteuid() != 0:
        pytest.skip("an attacker with another account needs root")
    tmp_path.chmod(0o755)
    log = tmp_path / "environments.log"
    file = user_code(tmp_path, AGENT.replace("WAYS", ""), "command.py")
    made = options(small_config, tmp_path, "", path=None, command=f"{sys.executable} {file}")
    with AgentPool(made, log=log) as pool:
        pool.play(records(2))
        secrets = [*pool.endpoint._keys.values(), pool.endpoint.control_url.rpartition("/")[2]]
        asked = next_turns(pool, 2)
        # While both agents wait for their first turn, with their addresses in their environments.
        command = [sys.executable, "-c", ATTACKER, str(pool.endpoint.port), str(tmp_path)]
        attacker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert attacker.stdin is not None and attacker.stdout is not None
        limit = threading.Timer(120, attacker.kill)
        limit.start()
        attacker.stdin.write(json.dumps(secrets).encode() + b"\n")
        attacker.stdin.flush()
        said = [attacker.stdout.readline().decode() for _ in range(2)]
        assert [line.split()[0] for line in said] == ["SEEN", "STATUSES"], said
        size, leaks = json.loads(said[0].removeprefix("SEEN "))
        assert size > 10_000 and leaks == []
        assert set(json.loads(said[1].removeprefix("STATUSES "))) <= {400, 404, 405, 414}
        assert pool.endpoint.events.empty()
        # The sessions go on beside its sockets.
        reply(asked)
        reply(next_turns(pool, 2))
        ended = {}
        while len(ended) < 2:
            if isinstance(event := pool.endpoint.events.get(timeout=60), Ended):
                ended[event.session] = (event.reward, event.failure)
        assert ended == {0: (20.0, ""), 1: (20.0, "")}
        attacker.communicate(b"\n")
        limit.cancel()


def next_turns(pool: AgentPool, num: int) -> list[Asked]:
    """Wait for ``num`` requests."""
    asked: list[Asked] = []
    while len(asked) < num:
        event = pool.endpoint.events.get(timeout=60)
        assert not isinstance(event, Ended), event
        if isinstance(event, Asked):
            asked.append(event)
    return asked


def reply(asked: list[Asked]) -> None:
    """Answer requests with 10."""
    for event in asked:
        event.reply.set_result(completion("0", {"role": "assistant", "content": "10"}, "stop", (1, 1), None))
