"""Which state belongs to which token: against a scheduler that chunks, batches, preempts and recomputes at random."""

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vllm_patches.buffer import RowBuffer
from vllm_patches.capture import PROMPT, STATES, ForwardStep, HiddenStateCapture
from vllm_patches.options import CaptureOptions

SELF = __name__


def make_capture(max_rows: int = 1000, **options: object) -> HiddenStateCapture:
    parsed = CaptureOptions.parse({"hidden_states": options})
    return HiddenStateCapture(parsed, RowBuffer(1, 2, torch.float32, "cpu", max_rows * 8))


def state_of(request: int, position: int, attempt: int = 0) -> list[float]:
    return [1000.0 * request + position, float(attempt)]


def make_step(work: list[tuple[str, int, int, bool, list[list[float]]]]) -> ForwardStep:
    """``work``: request id, tokens computed before, tokens in this step, whether its token is kept, their states."""
    scheduled = np.array([count for _, _, count, _, _ in work])
    return ForwardStep(
        request_ids=[request_id for request_id, *_ in work],
        computed=np.array([computed for _, computed, *_ in work], dtype=np.int32),
        scheduled=scheduled,
        sampled=np.array([sampled for *_, sampled, _ in work]),
        last_rows=None if (scheduled == 1).all() else torch.from_numpy(np.cumsum(scheduled) - 1),
        # vLLM pads the batch for CUDA graphs; the padding must not matter.
        states=[torch.tensor([row for *_, rows in work for row in rows] + [[-7.0, -7.0]])],
    )


def sample(capture: HiddenStateCapture, request: str, *states: list[float]) -> None:
    """Record a request with a prompt of one token: these states of it and of the tokens sampled after it."""
    capture.begin(request, 1)
    for position, state in enumerate(states):
        capture.record(make_step([(request, position, 1, True, [state])]))


def test_prompts_and_what_the_prefix_cache_spared():
    capture = make_capture(phase="both")
    capture.begin("a", 4)
    capture.record(make_step([("a", 2, 2, True, [[2, 0], [3, 0]])]))
    capture.record(make_step([("a", 4, 1, True, [[4, 0]])]))
    (result,) = capture.take([("a", 2)])
    assert result[STATES][:, 0, 0].tolist() == [3, 4]
    prompt = result[PROMPT][:, 0, 0]
    assert prompt.isnan().tolist() == [True, True, False, False] and prompt[2:].tolist() == [2, 3]


def test_prefill_alone_keeps_no_response():
    capture = make_capture(phase="prefill")
    capture.begin("a", 2)
    capture.record(make_step([("a", 0, 2, True, [[0, 0], [1, 0]])]))
    capture.record(make_step([("a", 2, 1, True, [[2, 0]])]))
    assert capture.buffer.num_rows == 2
    (result,) = capture.take([("a", 2)])
    assert set(result) == {PROMPT} and result[PROMPT][:, 0, 0].tolist() == [0, 1]


def test_prefill_stores_one_row_of_a_prompt():
    capture, stored = make_capture(), []
    append = capture.buffer.append
    capture.buffer.append = lambda rows, *more: (stored.append(len(rows[0])), append(rows, *more))
    for name in "ab":
        capture.begin(name, 4)
    capture.record(make_step([("a", 0, 4, True, [[i, 0] for i in range(4)]), ("b", 0, 2, False, [[0, 1], [1, 1]])]))
    capture.record(make_step([("a", 4, 1, True, [[4, 0]]), ("b", 2, 2, True, [[2, 1], [3, 1]])]))
    assert stored == [2, 2]
    results = capture.take([("a", 2), ("b", 1)])
    assert [result[STATES][:, 0].tolist() for result in results] == [[[3, 0], [4, 0]], [[3, 1]]]


def test_dropped_and_unknown_requests_hold_nothing():
    capture = make_capture()
    capture.record(make_step([("dummy of a warm-up", 0, 1, True, [[0, 0]])]))
    assert capture.buffer.num_rows == 0
    sample(capture, "a", [0, 0])
    capture.drop("a")
    capture.record(make_step([("a", 1, 1, True, [[1, 0]])]))
    assert capture.buffer.num_rows == 0
    capture.finish("a")
    capture.drop("never begun")
    assert len(capture) == 0
    sample(capture, "warm-up", [0, 0])
    capture.clear()
    assert len(capture) == capture.buffer.num_rows == capture.buffer.device_bytes == 0


def test_an_empty_response():
    capture = make_capture(phase="both")
    (result,) = capture.take([("aborted while waiting", 0)])
    assert result[STATES].shape == (0, 1, 2) and PROMPT not in result


def test_a_missing_state_is_an_error():
    capture = make_capture()
    sample(capture, "a", [0, 0])
    with pytest.raises(RuntimeError, match="request a: 1 hidden states for 2 tokens"):
        capture.take([("a", 2)])
    with pytest.raises(RuntimeError, match="request b: 0 hidden states for 1 tokens"):
        capture.take([("b", 1)])


def total(states: list[Tensor], scale: int) -> dict[str, Tensor]:
    sums = torch.stack([scale * response.sum(dim=0) for response in states])
    return {"sum": sums, "second": torch.cat(states)[:, 0, 1]}


def a_list(states: list[Tensor]) -> list[dict[str, Tensor]]:
    return [{"sum": response.sum(dim=0)} for response in states]


def too_few(states: list[Tensor]) -> dict[str, Tensor]:
    return {"sum": torch.zeros(0)}


def not_tensors(states: list[Tensor]) -> dict[str, list[float]]:
    return {"sum": [1.0 for _ in states]}


def test_a_reducer_takes_the_states_place():
    capture = make_capture(reducer=f"{SELF}:total", reducer_options={"scale": 10})
    for request_id, value in (("a", 1.0), ("b", 2.0)):
        sample(capture, request_id, [value, 0], [value, 1])
    a, empty, b = capture.take([("a", 2), ("aborted", 0), ("b", 1)])
    # A row of a column of responses, or as many rows of a column of tokens as the response has tokens.
    assert a["reduced.sum"].tolist() == [[[20, 10]]] and a["reduced.second"].tolist() == [0, 1]
    assert b["reduced.sum"].tolist() == [[[20, 0]]] and b["reduced.second"].tolist() == [0]
    assert empty == {}


@pytest.mark.parametrize("name", ["a_list", "too_few", "not_tensors"])
def test_a_reducer_that_breaks_its_contract_is_named(name: str):
    message = "must return a dict of tensors with one entry for each of 1 responses"
    capture = make_capture(reducer=f"{SELF}:{name}")
    sample(capture, "a", [0, 0])
    with pytest.raises(TypeError, match=f"reducer {SELF}:{name}: .*{message}"):
        capture.take([("a", 1)])


def test_states_are_gathered_in_bounded_portions(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("vllm_patches.capture.GATHERED_BYTES", 3 * 8)
    capture = make_capture(reducer=f"{SELF}:total", reducer_options={"scale": 1})
    sizes = []
    reducer = capture._reducer
    capture._reducer = lambda states: sizes.append([len(response) for response in states]) or reducer(states)
    lengths = [2, 1, 1, 5, 1, 1]
    for index, length in enumerate(lengths):
        sample(capture, f"r{index}", *[[index, 1]] * length)
    results = capture.take([(f"r{index}", length) for index, length in enumerate(lengths)])
    assert sizes == [[2, 1], [1], [5], [1, 1]]
    assert [int(result["reduced.sum"][0, 0, 1]) for result in results] == lengths
    assert capture.buffer.num_rows == 0


def test_a_failed_portion_loses_no_memory():
    capture = make_capture(reducer=f"{SELF}:too_few")
    for request_id in ("a", "b"):
        sample(capture, request_id, [0, 0])
        capture.finish(request_id)
    with pytest.raises(TypeError):
        capture.take([("a", 1), ("b", 1)])
    assert len(capture) == capture.buffer.num_rows == 0


@dataclass
class Request:
    number: int
    prompt: int
    response: int
    tokens: int = 0
    """Prompt and response tokens known so far."""
    computed: int = 0
    begun: bool = False
    sampled_in: dict[int, int] = field(default_factory=dict)
    """Position -> attempt in which the token after it was sampled."""


class Scheduler:
    """Computes requests in random chunks, preempts at random, as vLLM may."""

    def __init__(self, requests: list[Request], seed: int) -> None:
        self.requests = requests
        self.random = random.Random(seed)
        self.attempt = 0

    def step(self, capture: HiddenStateCapture) -> None:
        self.attempt += 1
        work = []
        for request in self.random.sample(self.requests, self.random.randint(1, len(self.requests))):
            if request.begun and self.random.random() < 0.1:
                request.computed = 0
            if request.computed == 0:
                capture.begin(f"r{request.number}", request.prompt)
                request.begun = True
            left = request.tokens - request.computed
            count = self.random.randint(1, left)
            rows = [state_of(request.number, request.computed + i, self.attempt) for i in range(count)]
            work.append((f"r{request.number}", request.computed, count, count == left, rows))
            request.computed += count
            if count == left:
                request.sampled_in[request.computed - 1] = self.attempt
                request.tokens += 1
        capture.record(make_step(work))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 6)), min_size=1, max_size=5), st.integers(), st.booleans())
def test_every_token_has_its_state_however_it_was_scheduled(sizes: list[tuple[int, int]], seed: int, both: bool):
    capture = make_capture(max_rows=12, phase="both" if both else "decode")
    requests = [Request(i, prompt, response, tokens=prompt) for i, (prompt, response) in enumerate(sizes)]
    scheduler = Scheduler(list(requests), seed)
    while scheduler.requests:
        scheduler.step(capture)
        for request in [r for r in scheduler.requests if r.tokens - r.prompt >= r.response]:
            scheduler.requests.remove(request)
            # One step more than the request needed, as asynchronous scheduling does.
            capture.record(make_step([(f"r{request.number}", request.tokens - 1, 1, True, [[-1, -1]])]))
            (result,) = capture.take([(f"r{request.number}", request.response)])
            positions = range(request.prompt - 1, request.prompt - 1 + request.response)
            assert result[STATES][:, 0].tolist() == [
                state_of(request.number, p, request.sampled_in[p]) for p in positions
            ]
            if both:
                expected = [state_of(request.number, p)[0] for p in range(request.prompt)]
                assert result[PROMPT][:, 0, 0].tolist() == expected
            capture.finish(f"r{request.number}")
    assert len(capture) == capture.buffer.num_rows == 0
