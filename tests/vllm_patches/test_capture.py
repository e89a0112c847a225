"""Which rows belong to which request; the engine itself is met in tests/workers/test_hybrid.py."""

import pytest
import torch

from vllm_patches import is_supported
from vllm_patches.capture import CaptureOptions, HiddenStateCapture


@pytest.fixture
def capture() -> HiddenStateCapture:
    return HiddenStateCapture(CaptureOptions())


def rows(*values: float) -> torch.Tensor:
    """One row per request, of width 2: the value and its negative."""
    return torch.tensor([[value, -value] for value in values])


def test_rows_follow_their_request_through_a_changing_batch(capture: HiddenStateCapture):
    capture.record(rows(1, 10), ["a", "b"], [False, False])
    capture.record(rows(20, 2), ["b", "a"], [False, False])  # the engine reorders its batch as it likes
    capture.record(rows(3, 100), ["a", "c"], [False, False])
    assert capture.pop("a", 3).tolist() == [[[1, -1]], [[2, -2]], [[3, -3]]]
    assert capture.pop("b", 2).tolist() == [[[10, -10]], [[20, -20]]]
    assert len(capture) == 1 and "c" in capture and "a" not in capture


def test_rows_of_unfinished_prompts_are_discarded(capture: HiddenStateCapture):
    capture.record(rows(1, 10), ["a", "b"], [True, False])
    capture.record(rows(2, 20), ["a", "b"], [False, False])
    assert capture.pop("a", 1).tolist() == [[[2, -2]]]
    assert capture.pop("b", 2).tolist() == [[[10, -10]], [[20, -20]]]


def test_the_step_computed_too_many_is_dropped(capture: HiddenStateCapture):
    for value in (1, 2, 3):
        capture.record(rows(value), ["a"], [False])
    assert capture.pop("a", 2).tolist() == [[[1, -1]], [[2, -2]]]
    assert len(capture) == 0


def test_recorded_rows_survive_the_reuse_of_the_engines_buffer(capture: HiddenStateCapture):
    buffer = rows(1)
    capture.record(buffer, ["a"], [False])
    buffer.fill_(9)
    assert capture.pop("a", 1).tolist() == [[[1, -1]]]


def test_too_few_rows_are_an_error(capture: HiddenStateCapture):
    capture.record(rows(1), ["a"], [False])
    with pytest.raises(RuntimeError, match="request a: captured 1 hidden states for 2 tokens"):
        capture.pop("a", 2)
    with pytest.raises(RuntimeError, match="request b: captured 0 hidden states for 1 tokens"):
        capture.pop("b", 1)


def test_as_many_rows_as_requests(capture: HiddenStateCapture):
    with pytest.raises(ValueError):
        capture.record(rows(1, 2), ["a"], [False])


def test_no_tokens_no_rows(capture: HiddenStateCapture):
    assert capture.pop("a", 0).shape[:2] == (0, 1)


def test_versions_outside_the_range_are_left_alone():
    known = ["0.24.0", "0.32.0+cpu", "0.33.1.dev3"]
    assert [is_supported(version) for version in known] == [True, True, True]
    assert [is_supported(version) for version in ["0.23.4", "0.34.0rc1", "1.0"]] == [False, False, False]


def test_options_default_to_the_final_norm():
    assert CaptureOptions.parse({}).layers == (-1,)
    assert CaptureOptions.parse({"layers": [-1]}).layers == (-1,)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (True, r"additional_config\['hidden_states'\]=True: must be a mapping such as"),
        ({"layer": [-1]}, r"unknown options \['layer'\]; known: \['layers'\]"),
        ({"layers": [3]}, r"\['layers'\]=\[3\]: only the state after the final norm, \[-1\]"),
        ({"layers": -1}, r"\['layers'\]=-1: only the state after the final norm, \[-1\]"),
    ],
)
def test_options_that_cannot_be_served_are_named(raw: object, message: str):
    with pytest.raises(ValueError, match=message):
        CaptureOptions.parse(raw)
