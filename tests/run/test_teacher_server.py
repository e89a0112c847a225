"""A teacher at an address: what it is asked and answers, what it refuses, and services that fail."""

import json
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
import torch

from tests import kit
from tests.kit import shipped_config
from verl.algorithms.divergence import DIVERGENCES, NO_TOKEN
from verl.batch import Batch
from verl.cluster.failures import MachineError
from verl.config import ConfigError
from verl.config.teacher import TeacherServerConfig
from verl.models.output_head import TeacherLoss
from verl.run import teacher_server
from verl.run.teacher_server import TeacherServer, ask_servers

Reply = Callable[[str, dict[str, Any]], tuple[int, Any]]


def logprob(token: int, place: int) -> float:
    return -0.5 * token - 0.01 * place


class Teacher:
    """A server as vLLM's; ``change`` may answer in its place with a status and a body."""

    def __init__(self, tokenizer, change: Reply = lambda path, body: (0, None), **model: Any) -> None:
        self.tokenizer, self.change = tokenizer, change
        self.models = [{"id": "large", "max_model_len": 64} | model]
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.keys = set[str | None]()

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        self.asked.append((path, body))
        changed = self.change(path, body)
        if changed[0]:
            return changed
        if path == "/v1/models":
            return 200, {"data": self.models}
        if path == "/tokenize":
            return 200, {"tokens": self.tokenizer(body["prompt"], add_special_tokens=False).input_ids}
        row, k = body["prompt"], body["prompt_logprobs"]
        # The likeliest tokens are those with the lowest ids, which vLLM lists after the prompt's token.
        listed = [
            {str(t): {"logprob": logprob(t, i), "rank": t + 1} for t in (token, *range(1, k + 1))}
            for i, token in enumerate(row)
        ]
        return 200, {"choices": [{"prompt_logprobs": [None, *listed[1:]], "text": "x"}]}

    @contextmanager
    def served(self) -> Iterator[str]:
        def answer(request: BaseHTTPRequestHandler, body: bytes) -> tuple[int, Any]:
            self.keys.add(request.headers.get("Authorization"))
            return self.answer(request.path, json.loads(body or b"{}"))

        with kit.served(answer) as address:
            yield f"{address}/v1"


def options(address: str, **changes: Any) -> TeacherServerConfig:
    fields = {"address": address, "max_in_flight": 3, "timeout_s": 10.0, "max_retries": 1} | changes
    return replace(shipped_config().teacher.server, **fields)


@contextmanager
def connected(
    tokenizer: Any, change: Reply = lambda path, body: (0, None), top_k: int = 0, **changes: Any
) -> Iterator[TeacherServer]:
    """Yield the client of a teacher's server, in whose place ``change`` may answer."""
    with Teacher(tokenizer, change).served() as address:
        yield TeacherServer(options(address, **changes), tokenizer, [], top_k=top_k)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher_server, "FIRST_PAUSE_S", 0.01)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def test_response_tokens_get_the_teachers_logprobs(tiny_tokenizer, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    rows = [([5, 6], [7, 8, 9]), ([10], [11]), ([12, 13, 14], [15, 16])]
    batch = Batch.of([prompt for prompt, _ in rows], [response for _, response in rows])
    teacher = Teacher(tiny_tokenizer)
    with teacher.served() as address:
        server = TeacherServer(options(f"{address}/"), tiny_tokenizer, ["What is 1 + 1?"])
        found = server.score(batch).teacher_logprobs
    expected = [logprob(token, len(p) + i) for p, response in rows for i, token in enumerate(response)]
    torch.testing.assert_close(found, torch.tensor(expected), rtol=0, atol=0)
    scored = [body for path, body in teacher.asked if path == "/v1/completions"][1:]
    assert sorted(body["prompt"] for body in scored) == sorted(p + r for p, r in rows)
    assert all(body["model"] == "large" and body["prompt_logprobs"] == 0 for body in scored)
    assert server.limit == 64 and not server.note and teacher.keys == {"Bearer secret"}


def test_server_returns_its_likeliest_tokens(tiny_tokenizer, refused):
    batch = Batch.of([[5, 6]], [[7, 2]])
    with Teacher(tiny_tokenizer).served() as address:
        found = TeacherServer(options(address), tiny_tokenizer, [], top_k=3).score(batch)
        with refused("teacher.top_k=262: must be below the vocabulary of 262"):
            TeacherServer(options(address), tiny_tokenizer, [], top_k=262)
    assert found.teacher_top_k_ids.tolist() == [[1, 2, 3], [1, 2, 3]]
    expected = [[logprob(token, place) for token in (1, 2, 3)] for place in (2, 3)]
    assert found.teacher_top_k_logprobs.tolist() == [pytest.approx(row) for row in expected]
    assert found.teacher_logprobs.tolist() == pytest.approx([logprob(7, 2), logprob(2, 3)])


def listing(row: list[int], *entries: dict[int, float]) -> Reply:
    """Return the server's answer to a row, with the log-probabilities by token after the first."""
    listed = [{str(token): {"logprob": value} for token, value in entry.items()} for entry in entries]
    answer = {"choices": [{"prompt_logprobs": [None, *listed]}]}
    return lambda path, body: (200, answer) if body.get("prompt") == row else (0, None)


def test_padding_of_the_servers_head_is_left_out(tiny_tokenizer):
    num_ids, k, row = 262, 4, [5, 6, 7, 8, 9]
    student, teacher = 2 * torch.randn(2, 4, 280, generator=torch.Generator().manual_seed(0))
    # At most four ids of padding have a probability that float64 can see. They are all among the likeliest.
    teacher[:, num_ids:] = -1e4
    teacher[0, 270] = teacher[1, 262] = teacher[1, 279] = teacher[3, 265:269] = 8.0
    listed = teacher.double().log_softmax(dim=1)
    entries = [
        {i: position[i].item() for i in {token, *position.topk(k).indices.tolist()}}
        for token, position in zip(row[1:], listed, strict=True)
    ]
    with connected(tiny_tokenizer, listing(row, *entries), top_k=k) as server:
        found = server.score(Batch.of([row[:1]], [row[1:]]))
    cut = teacher[:, :num_ids].log_softmax(dim=1)
    expected = cut.gather(1, torch.tensor(row[1:])[:, None])[:, 0]
    torch.testing.assert_close(found.teacher_logprobs, expected, rtol=1e-5, atol=1e-5)
    kept = [3, 2, 4, 0]
    assert [sum(index != NO_TOKEN for index in ids) for ids in found.teacher_top_k_ids.tolist()] == kept
    entries = torch.cat([found.teacher_top_k_logprobs, found.teacher_top_k_ids.float()], dim=1)
    for name in DIVERGENCES:
        served, exact = (student.clone().requires_grad_() for _ in range(2))
        losses = TeacherLoss(name, 1.0, 0.3, k, num_ids, is_top_k=True).of(served, entries)
        assert losses[3].abs() < 1e-5  # with no token known, nothing is compared
        losses[:3].sum().backward()
        terms = [TeacherLoss(name, 1.0, 0.3, kept[i], num_ids).of(exact[i], teacher[i]) for i in range(3)]
        sum(terms).backward()
        torch.testing.assert_close(losses[:3], torch.stack(terms), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(served.grad, exact.grad, rtol=1e-4, atol=1e-6)


def test_sampled_padding_is_read_as_the_last_token(tiny_tokenizer):
    teacher = Teacher(tiny_tokenizer)
    with teacher.served() as address:
        TeacherServer(options(address), tiny_tokenizer, []).score(Batch.of([[5]], [[270, 6]]))
    assert teacher.asked[-1][1]["prompt"] == [5, 261, 6]


@pytest.mark.parametrize(
    ("entry", "k", "line"),
    [
        ({6: -1.0}, 2, "fewer tokens than teacher.top_k=2; lower it"),
        ({-1: -0.1, 6: -1.0}, 1, "without the log-probabilities of the prompt..."),
        *(({6: value}, 0, "...log-probabilities...") for value in (0.5, math.nan, -math.inf, -1e308, -(10**400))),
    ],
)
def test_unfit_logprobs_are_refused(tiny_tokenizer, refused, entry: dict[int, float], k: int, line: str):
    with connected(tiny_tokenizer, listing([5, 6], entry), top_k=k) as server:
        with refused(f"...answered {line}", MachineError):
            server.score(Batch.of([[5]], [[6]]))


def test_each_row_is_scored_by_its_server(tiny_tokenizer, refused):
    shifted = Teacher(tiny_tokenizer)
    shifted.models[0]["id"] = "second"
    batch = Batch.of([[5], [6, 7], [8]], [[1, 2], [3], [4]]).fill(teacher=torch.tensor([1, 0, 1]))
    with Teacher(tiny_tokenizer).served() as first, shifted.served() as second:
        fields = ("teacher.server.address", "teacher.by_source[b]")
        servers = [
            TeacherServer(options(address), tiny_tokenizer, [], field=field)
            for address, field in zip((first, second), fields, strict=True)
        ]
        found = ask_servers(servers, batch).teacher_logprobs
        asked = [body["prompt"] for path, body in shifted.asked if path == "/v1/completions"][1:]
        shifted.change = of("/v1/completions", 500, b"broken")
        with refused("teacher.by_source[b]='...': ...completions answered 500: broken", MachineError):
            ask_servers(servers, batch)
    expected = [logprob(1, 1), logprob(2, 2), logprob(3, 2), logprob(4, 1)]
    assert found.tolist() == pytest.approx(expected) and sorted(asked) == [[5, 1, 2], [8, 4]]


def test_row_longer_than_the_server_reads_is_refused(tiny_tokenizer, refused):
    with Teacher(tiny_tokenizer, max_model_len=40).served() as address:
        server = TeacherServer(options(address), tiny_tokenizer, [])
        server.score(Batch.of([[5] * 30], [[6] * 9]))
        with refused("...a prompt with its response has 40 tokens, and the server reads 39; start it with a larger..."):
            server.score(Batch.of([[5] * 30], [[6] * 10]))


def of(path: str, status: int, body: Any) -> Reply:
    return lambda asked, _: (status, body) if asked == path else (0, None)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (of("/v1/models", 401, {"error": "no key"}), 'ADDRESS/models answered 401: {"error": "no key"}'),
        (of("/v1/models", 200, {"data": [{"id": "a"}, {"id": "b"}]}), "has the models a, b; set teacher...model to..."),
        (of("/v1/models", 200, [1]), "ADDRESS/models answered no list of models"),
        (of("/v1/models", 200, b"<html>hello</html>"), "ADDRESS/models answered no JSON: <html>hello</html>"),
        (of("/v1/models", 200, b" " * (2 << 20)), "ADDRESS/models answered more than 1048576 bytes"),
        (of("/tokenize", 200, {"tokens": [1]}), "has another tokenizer than the policy: 'What is 12 * 34?' is [1] ..."),
        (of("/v1/completions", 200, {"choices": [{"text": "x"}]}), "answered without the log-probabilities..."),
        (
            lambda path, body: (
                200 * path.endswith("completions"),
                {"choices": [{"prompt_logprobs": [None for _ in body.get("prompt", [])]}]},
            ),
            "answered without the log-probabilities...",
        ),
        (of("/v1/completions", 302, b""), "ADDRESS/completions answered 302: "),
    ],
)
def test_unfit_server_is_refused_before_the_run(tiny_tokenizer, refused, change: Reply, line: str):
    with Teacher(tiny_tokenizer, change).served() as address:
        with refused(f"teacher.server.address='ADDRESS': {line}", ADDRESS=address):
            TeacherServer(options(address), tiny_tokenizer, [])


@pytest.mark.parametrize("key", ["secret", "secret\n"])
def test_key_appears_in_no_message(tiny_tokenizer, monkeypatch, key: str):
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with Teacher(tiny_tokenizer, of("/v1/models", 401, "no such key: secret")).served() as address:
        with pytest.raises(ConfigError) as raised:
            TeacherServer(options(address, max_retries=0), tiny_tokenizer, [])
    assert "secret" not in str(raised.value) and "\n" not in str(raised.value)


def test_no_tokenize_is_noted_and_no_server_refused(tiny_tokenizer, refused):
    with connected(tiny_tokenizer, of("/tokenize", 404, {})) as server:
        assert server.note.startswith("teacher.server.address: the tokenizers are not compared")
    with refused("teacher.server.address='http://127.0.0.1:9/v1': http://127.0.0.1:9/v1/models does not answer (...)"):
        TeacherServer(options("http://127.0.0.1:9/v1"), tiny_tokenizer, [])


@pytest.mark.parametrize(("failures", "retries"), [(2, 2), (2, 1)])
def test_failing_request_is_repeated(tiny_tokenizer, refused, failures: int, retries: int):
    left = [0]

    def change(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        left[0] -= 1
        return (503, b"busy") if path == "/v1/completions" and left[0] >= 0 else (0, None)

    with connected(tiny_tokenizer, change, max_retries=retries) as server:
        left[0] = failures
        if retries >= failures:
            assert server.score(Batch.of([[5]], [[6]])).teacher_logprobs.tolist() == [pytest.approx(logprob(6, 1))]
        else:
            with refused("...completions answered 503: busy", MachineError):
                server.score(Batch.of([[5]], [[6]]))


def test_silent_server_costs_the_time_limit(tiny_tokenizer, refused):
    silence = threading.Event()

    def change(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if len(body.get("prompt", "")) == 2:
            silence.wait(20)
        return 0, None

    with connected(tiny_tokenizer, change, timeout_s=0.5, max_retries=0) as server:
        with refused("...completions did not answer within 0.5 s", MachineError):
            server.score(Batch.of([[5]], [[6]]))
        silence.set()
