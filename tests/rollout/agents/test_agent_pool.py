"""Processes of agents: what they run, and what one that misbehaves costs."""

import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit import changed, refused, user_code
from verl.config import PPOConfig
from verl.data.prompt_record import PromptRecord
from verl.rollout.agents.endpoint import Asked, Ended
from verl.rollout.agents.pool import EXCHANGE_S, MAX_ERROR_BYTES, STOP_S, AgentPool, load_agent, read_reward
from verl.rollout.agents.protocol import completion
from verl.rollout.agents.sandboxed import prepare_sandboxed
from verl.rollout.environments.conversations import check_conversations

AGENTS = """
import asyncio, json, os, subprocess, sys, time, urllib.request

def ask(base_url):
    body = json.dumps({"messages": [{"role": "user", "content": "hello"}]}).encode()
    with urllib.request.urlopen(urllib.request.Request(base_url + "/chat/completions", body)) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]

def in_thread(record, base_url, api_key):
    return float(ask(base_url)) + record.uid

async def coroutine(record, base_url, api_key):
    return float(await asyncio.to_thread(ask, base_url)) + record.uid

GATE = asyncio.Semaphore(2)

async def through_threads(record, base_url, api_key):
    async with GATE:
        return float(await asyncio.to_thread(ask, base_url)) + record.uid

async def leave():
    raise SystemExit

async def misbehaves(record, base_url, api_key):
WAYS
    await asyncio.sleep(1)
    return 1.0
"""


def options(config: PPOConfig, folder: Path, name: str, *ways: str, **agent: Any) -> Any:
    """Return the options of an agent; ``misbehaves`` does so in another way in each of the first sessions."""
    source = "\n".join(f"    if record.uid == {uid}:\n        {way}" for uid, way in enumerate(ways))
    path = user_code(folder, AGENTS.replace("WAYS", source)) + f":{name}"
    turns = {"enable": True, "num_workers": 2, "agent": {"path": path, "timeout_s": 60.0} | agent}
    return changed(config, rollout={"multi_turn": turns}).rollout.multi_turn


def records(num: int) -> list[PromptRecord]:
    return [PromptRecord(uid, [1], "x", None, {}, [], False) for uid in range(num)]


def play(pool: AgentPool, num: int, num_closed: int = 0) -> dict[int, Ended]:
    """Play sessions, answering every request with 10, until all have ended; the first are closed at once."""
    pool.play(records(num))
    ended: dict[int, Ended] = {}
    while len(ended) < num:
        event = pool.endpoint.events.get(timeout=60)
        if isinstance(event, Asked):
            message = {"role": "assistant", "content": "10"}
            event.reply.set_result(completion("0", message, "stop", (1, 1), None))
        elif isinstance(event, Ended):
            ended.setdefault(event.session, event)
        for number in set(range(num_closed)) - ended.keys():
            pool.endpoint.close_session(number)
            ended[number] = Ended(number, 0.0, "closed")
    return ended


class Slowly(list[int]):
    """Numbers during whose reading a process reports several times."""

    def __iter__(self) -> Iterator[int]:
        for each in range(len(self)):
            yield self[each]
            time.sleep(2 * EXCHANGE_S)


def rewards(ended: dict[int, Ended]) -> list[float]:
    return [ended[number].reward for number in range(len(ended))]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["in_thread", "coroutine", "through_threads"])
def test_stopped_agents_log_no_error_and_run_again(small_config, tmp_path, name):
    log = tmp_path / "log"
    with AgentPool(options(small_config, tmp_path, name, max_sessions=4), log=log) as pool:
        pool.play(records(6))
        asked: list[Asked] = []
        while len(asked) < 4:
            event = pool.endpoint.events.get(timeout=60)
            asked += [event] if isinstance(event, Asked) else []
        # All stop at once, or those that wait would start; and the last request is one that nobody has read.
        pool.endpoint.events.put(asked.pop())
        pool.endpoint.stop(Slowly(range(6)), [event.reply for event in asked])
        started = time.monotonic()
        pool.submit(bool).result()  # after the sessions
        assert time.monotonic() - started < STOP_S
        ended = play(pool, 6)
    assert rewards(ended) == [10.0 + i for i in range(6)] and not any(event.failure for event in ended.values())
    assert "Traceback" not in log.read_text()


@pytest.mark.slow
def test_a_command_gets_record_and_address(small_config, tmp_path):
    source = AGENTS + (
        "\nif __name__ == '__main__':\n    record = json.load(sys.stdin)\n    print('noise' * 100_000)\n"
        "    reward = float(ask(os.environ['OPENAI_BASE_URL'])) + record['uid']\n"
        "    if record['uid'] == 2:\n        subprocess.Popen(['sleep', '1000'])\n"
        "    sys.exit(3) if record['uid'] == 1 else print(json.dumps({'reward': reward}))\n"
    )
    file = user_code(tmp_path, source.replace("WAYS", ""), "command.py")
    with AgentPool(options(small_config, tmp_path, "", path=None, command=f"python3 {file}")) as pool:
        ended = play(pool, 3)
    assert rewards(ended) == [10.0, 0.0, 12.0]
    assert ended[1].failure == "RuntimeError: the command ended with code 3"


SANDBOXED = """
import json, os, socket, sys, time, urllib.request
secret, port = sys.argv[1].removeprefix("secret="), int(sys.argv[2])

def fails(call, *arguments):
    try:
        return call(*arguments) and False
    except OSError:
        return True

url = os.environ["OPENAI_BASE_URL"]
# More connections than the forwarder may have open.
held = [socket.create_connection(("127.0.0.1", int(url.split(":")[2].split("/")[0]))) for _ in range(200)]
time.sleep(0.5)
for connection in held:
    connection.close()
body = json.dumps({"messages": [{"role": "user", "content": "hello"}]}).encode()
with urllib.request.urlopen(urllib.request.Request(url + "/chat/completions", body)) as reply:
    answer = json.load(reply)["choices"][0]["message"]["content"]
facts = {
    "answer": answer == "10" and os.environ["OPENAI_API_KEY"] in url,
    "files": fails(open, secret) and fails(open, __file__, "a") and not os.path.exists("/home"),
    "socket": fails(os.utime, "/endpoint") and fails(os.chmod, "/endpoint", 0),
    "network": fails(socket.create_connection, ("127.0.0.1", port)) and fails(socket.socket, socket.AF_VSOCK),
    "sessions": fails(urllib.request.urlopen, url[:-8] + "/v1/models"),
    "variables": "VERL_POOL_PROCESS" not in os.environ,
}
print(facts, file=sys.stderr)
sys.stderr.write("flood" * 1_000_000)
print(json.dumps({"reward": float(json.load(sys.stdin)["uid"] + all(facts.values()))}))
"""


@pytest.mark.slow
@pytest.mark.usefixtures("sandbox")
def test_a_sandboxed_command_reaches_its_address_alone(small_config, tmp_path, monkeypatch):
    (deep := tmp_path / ("folder" * 20)).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))  # too long for a Unix socket
    (tmp_path / "agent").mkdir()
    file = user_code(tmp_path / "agent", SANDBOXED, "command.py")
    (tmp_path / "secret").write_text("1")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        words = f"{sys.executable} {file} secret={tmp_path}/secret {listener.getsockname()[1]}"
        made = options(small_config, tmp_path, "", path=None, command=words, sandbox=True)
        with AgentPool(made, log=tmp_path / "log") as pool:
            ended = play(pool, 2)
    assert rewards(ended) == [1.0, 2.0], (tmp_path / "log").read_text()[:5000]
    assert (tmp_path / "log").stat().st_size < 3 * MAX_ERROR_BYTES


@pytest.mark.slow
@pytest.mark.usefixtures("sandbox")
def test_a_sandboxed_command_names_what_it_shows(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    agent = user_code(tmp_path, "pass", "agent.py")
    with refused(f"f.sandbox=True: the agent would see all of {tmp_path}; put {agent} in another folder"):
        prepare_sandboxed(["/usr/bin/env", str(agent)], "f")
    with refused("f.command: there is no program 'pythn'"):
        prepare_sandboxed(["pythn", str(agent)], "f")
    # The home folder in other words, and the working folder.
    (project := tmp_path / "project" / "below").mkdir(parents=True)
    (link := tmp_path / "project" / "link").symlink_to(tmp_path)
    monkeypatch.chdir(project)
    user_code(project.parent, "pass", "agent.py")
    for path in ("../../agent.py", f"{link}/agent.py", "../agent.py", "."):
        with refused("f.sandbox=True: the agent would see all of ..."):
            prepare_sandboxed(["/usr/bin/env", path], "f")
    # Programs after env have the folders around them, and words are no files only because they are short or empty.
    (program := project / "venv" / "bin" / "python").parent.mkdir(parents=True)
    program.touch(mode=0o755)
    made = prepare_sandboxed(["env", "A=1", "venv/bin/python", "", "-c", "x" * 5000], "f")
    assert made.words == ["/usr/bin/env", "A=1", str(program), "", "-c", "x" * 5000]
    assert made.folders == [str(project / "venv")]


@pytest.mark.parametrize(("command", "why"), [("", "names no program"), ("python 'a.py", "No closing quotation")])
def test_commands_without_a_program_are_refused(small_config, tmp_path, command, why):
    made = options(small_config, tmp_path, "", path=None, command=command)
    with refused(f"rollout.multi_turn.agent.command={command!r}: {why}"):
        load_agent(made.agent)


WAYS = {
    "raise ValueError('no')": "ValueError: no",
    "raise KeyboardInterrupt": "KeyboardInterrupt: ",
    "return 'many'": "ValueError: could not convert",
    "return float('nan')": "ValueError: the agent returned the reward nan",
    # The task ends, and its agent with a reward.
    "asyncio.create_task(leave()); await asyncio.sleep(0.1); return 0.5": "",
}


@pytest.mark.slow
def test_failed_agents_cost_their_own_episodes(small_config, tmp_path):
    log = tmp_path / "log"
    with AgentPool(options(small_config, tmp_path, "misbehaves", *WAYS), log=log) as pool:
        ended = play(pool, 12)  # half of them in the process of those that misbehave
    for number, failure in enumerate(WAYS.values()):
        assert ended[number].failure.startswith(failure) and bool(ended[number].failure) == bool(failure)
    assert rewards(ended) == [0.0] * 4 + [0.5] + [1.0] * 7 and "Traceback" in log.read_text()


@pytest.mark.slow
def test_a_process_that_ends_costs_its_sessions_alone(small_config, tmp_path):
    with AgentPool(options(small_config, tmp_path, "misbehaves", "os._exit(5)")) as pool:
        ended = play(pool, 4)
    assert all(ended[i].failure.startswith("its process ended") for i in (0, 1))
    assert rewards(ended) == [0.0, 0.0, 1.0, 1.0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ways", "expected"),
    [
        (["await asyncio.sleep(999)", "await asyncio.to_thread(time.sleep, 999)"], [0.0, 0.0, 1.0, 1.0, 1.0, 1.0]),
        # Session 1 is in the same process, which has to be replaced.
        (["time.sleep(999)"], [0.0, 0.0, 1.0, 1.0]),
    ],
)
def test_hanging_agents_that_are_closed_stop_nobody(small_config, tmp_path, ways, expected):
    started = time.monotonic()
    with AgentPool(options(small_config, tmp_path, "misbehaves", *ways)) as pool:
        ended = play(pool, len(expected), len(ways))
    assert rewards(ended) == expected and time.monotonic() - started < 60


def test_the_reward_of_a_command_is_in_its_last_line():
    assert read_reward('so\n{"reward": 0.5}\n') == 0.5
    assert read_reward('{"reward": 1}\nbye') is None
    assert read_reward("") is None and read_reward("[" * 100_000) is None


def test_an_agent_of_another_form_is_refused(small_config, tmp_path, tiny_tokenizer):
    path = user_code(tmp_path, "async def agent(record): ...\n", "other.py") + ":agent"
    made = options(small_config, tmp_path, "", path=path)
    with refused("rollout.multi_turn.agent.path=...it is called with (record, base_url, api_key)..."):
        check_conversations(made, tiny_tokenizer, "chat", {})
