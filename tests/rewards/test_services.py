"""Reward functions that are coroutines, in the pool and against services that fail in every way."""

import asyncio
import json
import os
import sqlite3
import time
from contextlib import closing
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.kit import scoring, user_code
from verl.config.judge import JUDGE
from verl.config.rewards import AsyncFunctionsConfig
from verl.rewards.custom import CustomFunctionError
from verl.rewards.pool import ANSWERS, VerifierPool
from verl.rewards.registry import compute_score, use_custom_functions
from verl.rewards.services import _Answers
from verl.utils.background import start_loop
from verl.verifiers.verdict import Verdict

SOURCE = """
import asyncio, json, time

async def judge(data_source, solution_str, ground_truth, extra_info=None, port=0):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(solution_str.encode() + b"\\n")
    await writer.drain()
    line = await reader.readline()
    writer.close()
    return json.loads(line)

async def blocks(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(600)
"""


class Service:
    """A service on loopback that answers a line with a score, and misbehaves where the line says how."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.most = self.now = 0
        """Most requests at a time so far, and those of now."""
        started = asyncio.run_coroutine_threadsafe(asyncio.start_server(self._answer, "127.0.0.1", 0), start_loop())
        self._server = started.result()
        self.port = self._server.sockets[0].getsockname()[1]

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        text = (await reader.readline()).decode().strip()
        self.asked.append(text)
        self.now += 1
        self.most = max(self.most, self.now)
        kind, tries = text.split()[0], self.asked.count(text)
        if kind == "slow":
            await asyncio.sleep(0.3)
        if kind == "silent" or (kind == "silent-once" and tries == 1):
            await asyncio.sleep(30)
        if not (kind == "closed" or (kind == "closed-once" and tries == 1)):
            writer.write(
                {"html": b"<html>502</html>\n", "half": b'{"score": 0.5, "a'}.get(
                    kind, json.dumps({"score": len(text), "acc": 1, "cost": 0.25}).encode() + b"\n"
                )
            )
        self.now -= 1
        writer.close()


@pytest.fixture
def service() -> Service:
    return Service()


def options(tmp_path: Path, port: int, on_function_error: str = "zero", **async_functions: Any):
    file = user_code(tmp_path, SOURCE)
    calls: dict[str, Any] = {"max_in_flight": 64, "timeout_s": 1.0, "max_retries": 1, "cache": True} | async_functions
    return scoring(
        custom_functions=[f"mine={file}:judge"],
        custom_kwargs={"port": port},
        on_function_error=on_function_error,
        num_workers=1,
        async_functions=AsyncFunctionsConfig(**calls),
    )


def ask(pool: VerifierPool, *texts: str) -> list[Verdict]:
    sources = ["arithmetic" if text.isdigit() else "mine" for text in texts]
    return pool.score_batch(sources, list(texts), ["7"] * len(texts), [{}] * len(texts))


@pytest.mark.slow
def test_answers_are_kept_and_asked_for_once(service: Service, tmp_path: Path):
    config = options(tmp_path, service.port)
    with VerifierPool(config, folder=tmp_path) as pool:
        found = ask(pool, "good one", "7", "good one", "closed-once", "silent-once", "8")
        # What is there is in the file while another call waits, so that a killed run has it.
        pending = pool.submit_batch(["mine"] * 2, ["early", "silent"], ["7"] * 2, [{}] * 2)
        with closing(sqlite3.connect(tmp_path / ANSWERS)) as database:
            while database.execute("SELECT count(*) FROM answers").fetchone() != (4,):
                assert not pending.done()
                time.sleep(0.01)
        assert [verdict.reason for verdict in pending.result()] == ["custom", "error"]
    assert [verdict.score for verdict in found] == [8.0, 1.0, 8.0, 11.0, 11.0, 0.0]
    assert [verdict.reason for verdict in found] == ["custom", "exact", "custom", "custom", "custom", "different"]
    assert [verdict.extras.get("calls") for verdict in found] == [1, None, 1, 2, 2, None]
    assert found[0].extras == {"calls": 1, "from_cache": False, "cost": 0.25}
    assert sorted(service.asked)[:5] == ["closed-once"] * 2 + ["early", "good one"] + ["silent"]
    # A resumed run has them, another ground truth or function has not, and a damaged answer is asked for again.
    service.asked.clear()
    with sqlite3.connect(tmp_path / ANSWERS) as database:
        assert database.execute("UPDATE answers SET verdict = '{' WHERE verdict LIKE '%11.0%'").rowcount == 2
    with VerifierPool(config, folder=tmp_path) as pool:
        again, early = ask(pool, "good one", "early")
        assert (again.score, again.extras["from_cache"], service.asked) == (8.0, True, [])
        assert early.score == 5.0 and early.extras["from_cache"]
        assert ask(pool, "closed-once")[0].extras["calls"] == 2
        pool.score_batch(["mine"], ["good one"], ["8"], [{}])
    assert service.asked == ["closed-once", "closed-once", "good one"]
    user_code(tmp_path, SOURCE + "\n# changed")
    with VerifierPool(config, folder=tmp_path) as pool:
        assert not ask(pool, "good one")[0].extras["from_cache"]


@pytest.mark.slow
def test_failing_service_costs_what_the_option_says(service: Service, tmp_path: Path, caplog):
    with VerifierPool(options(tmp_path, service.port), folder=tmp_path) as pool:
        found = ask(pool, "closed", "half", "html", "silent", "good")
        assert [(verdict.score, verdict.reason) for verdict in found] == [(0.0, "error")] * 4 + [(4.0, "custom")]
    (warning,) = caplog.records
    assert "mine.py:judge" in warning.getMessage() and "2 calls failed" in warning.getMessage()
    with VerifierPool(options(tmp_path, service.port, "fail"), folder=tmp_path) as pool:
        with pytest.raises(CustomFunctionError, match="longer than 1 s; 2 calls failed") as raised:
            ask(pool, "silent")
    assert "\n" not in str(raised.value)


@pytest.mark.slow
def test_calls_wait_together_up_to_the_limit(service: Service, tmp_path: Path):
    texts = [f"slow {i}" for i in range(40)]
    with VerifierPool(options(tmp_path, service.port, max_in_flight=8, cache=False, timeout_s=30.0)) as pool:
        found = ask(pool, *texts)
    assert [verdict.score for verdict in found] == [float(len(text)) for text in texts]
    assert service.most == 8 and not (tmp_path / ANSWERS).exists()


@pytest.mark.slow
def test_coroutine_that_blocks_its_loop_is_killed(service: Service, tmp_path: Path):
    config = options(tmp_path, service.port)
    functions = [config.custom_functions[0].replace("judge", "blocks")]
    config = scoring(**vars(config) | {"custom_functions": functions, "custom_kwargs": {}})
    start = time.monotonic()
    with VerifierPool(config) as pool:
        assert [verdict.reason for verdict in ask(pool, "anything", "7")] == ["crash", "exact"]
    assert time.monotonic() - start < 300  # it sleeps for 600 s


@pytest.mark.slow
def test_unusable_cache_is_named(service: Service, tmp_path: Path, refused):
    (tmp_path / ANSWERS).write_text("no database, " * 100)
    with VerifierPool(options(tmp_path, service.port), folder=tmp_path) as pool:
        with refused(
            "TMP/reward_answers.sqlite: answers of reward functions cannot be kept there: ...; move it away",
            TMP=tmp_path,
        ):
            ask(pool, "good")


def test_damaged_cache_keeps_its_readable_answers(tmp_path: Path):
    """Of a file that is cut in the middle of a record, what can be read is not asked for again."""
    file = tmp_path / ANSWERS
    verdicts = {f"{i:03d}" * 10: Verdict(True, False, "custom", score=float(i)) for i in range(99)}
    with closing(_Answers(file)) as answers:
        for key, verdict in verdicts.items():
            answers.keep(key, verdict)
    os.truncate(file, file.stat().st_size // 2 - 100)
    with closing(_Answers(file)) as answers:
        found = {key: answers.find(key) for key in verdicts}
        missing = [key for key, verdict in found.items() if verdict is None]
        assert 0 < len(missing) < 90 and all(found[key] in (None, verdict) for key, verdict in verdicts.items())
        answers.keep(missing[0], verdicts[missing[0]])
        assert answers.find(missing[0]) == verdicts[missing[0]]
    assert file.with_suffix(".damaged").exists()


def test_score_runs_a_coroutine(service: Service, tmp_path: Path):
    config = options(tmp_path, service.port)
    use_custom_functions(config.paths_of_custom_functions(), config.custom_kwargs)
    assert compute_score("mine", "good", "7")["score"] == 4.0
    use_custom_functions({})


@pytest.mark.slow
@pytest.mark.parametrize("by_hand", [False, True])
def test_key_reaches_the_judge_through_the_pool(by_hand: bool, monkeypatch: pytest.MonkeyPatch):
    """Also of the function named by hand, beside options of a judge in the run that is off."""
    keys: list[str | None] = []

    class Judge(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            keys.append(self.headers.get("Authorization"))
            self.rfile.read(int(self.headers["Content-Length"]))
            body = json.dumps({"choices": [{"message": {"content": '{"reason": "r", "score": 0.75}'}}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", f"{len(body)}")
            self.end_headers()
            self.wfile.write(body)

    monkeypatch.setenv("MY_KEY", "secret")
    with ThreadingHTTPServer(("127.0.0.1", 0), Judge) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        given = {"base_url": f"http://127.0.0.1:{server.server_port}/v1", "api_key_variable": "MY_KEY"}
        judge = scoring().judge
        if by_hand:
            judge = replace(judge, model=replace(judge.model, path="policy"))
            functions = {"custom_functions": [f"mine={JUDGE}"], "custom_kwargs": {"model": "m", **given}}
            config = scoring(judge=judge, num_workers=1, **functions)
        else:
            judge = replace(judge, enable=True, model=replace(judge.model, name="m"), data_sources=["mine"], **given)
            config = scoring(judge=judge, num_workers=1)
        with VerifierPool(config) as pool:
            (found,) = ask(pool, "good")
        server.shutdown()
    assert (found.score, found.correct, keys) == (0.75, True, ["Bearer secret"])
