"""Rows are found again whatever the order of writing, the size of the buffer and what was spilled meanwhile."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_patches import buffer as buffer_module
from vllm_patches.buffer import NOBODY, RowBuffer

ROW_BYTES = 2 * 3 * 4
"""Two layers, width 3, float32."""


def make_buffer(max_rows: int) -> RowBuffer:
    return RowBuffer(2, 3, torch.float32, "cpu", max_rows * ROW_BYTES)


def layers(values: list[float]) -> list[torch.Tensor]:
    """Rows of two layers; the second holds the negatives."""
    rows = torch.tensor(values, dtype=torch.float32)[:, None].expand(-1, 3)
    return [rows, -rows]


def append(buffer: RowBuffer, values: list[float], owners: list[int], positions: list[int]) -> None:
    buffer.append(layers(values), np.array(owners, dtype=np.int64), np.array(positions, dtype=np.int64))


def values(buffer: RowBuffer, owner: int, first: int, count: int) -> list[float]:
    rows, found = buffer.gather(owner, first, count)
    assert rows.shape == (count, 2, 3)
    torch.testing.assert_close(rows[:, 1], -rows[:, 0], equal_nan=True)
    assert (rows[:, 0, 0].isnan().numpy() == ~found).all()
    return rows[:, 0, 0].tolist()


def test_recorded_rows_survive_the_reuse_of_the_engines_buffers():
    buffer = make_buffer(8)
    rows = [layer.clone() for layer in layers([1.0])]
    owners, positions = np.array([5]), np.array([0])
    buffer.append(rows, owners, positions)
    for engines_own in (*rows, owners, positions):
        engines_own *= 9
    assert values(buffer, 5, 0, 1) == [1]


def test_the_device_holds_at_most_max_bytes_and_nothing_is_lost():
    buffer = make_buffer(8)
    for position in range(30):
        append(buffer, [position, 100 + position], [1, 2], [position, position])
        assert buffer.device_bytes <= 8 * ROW_BYTES
    assert buffer.host_bytes == (60 - 8) * ROW_BYTES
    assert values(buffer, 1, 0, 30) == list(range(30))
    assert values(buffer, 2, 0, 30) == list(range(100, 130))


def test_what_nobody_needs_is_not_spilled():
    buffer = make_buffer(8)
    for position in range(20):
        append(buffer, [position, 100 + position], [1, NOBODY], [position, 0])
    assert buffer.host_bytes == (20 - 4) * ROW_BYTES
    assert values(buffer, 1, 0, 20) == list(range(20))


def test_a_row_must_fit():
    with pytest.raises(ValueError, match=f"max_bytes=10: one row of 2 x 3 torch.float32 takes {ROW_BYTES}"):
        RowBuffer(2, 3, torch.float32, "cpu", 10)
    assert RowBuffer(2, 3, torch.float32, "cpu", ROW_BYTES).rows_per_segment == 1


def test_the_first_rows_settle_the_width():
    buffer = RowBuffer(2, 64, torch.float32, "cpu", 8 * 2 * 64 * 4)
    append(buffer, [1, 2], [5, 5], [0, 1])
    assert buffer.row_shape == (2, 3) and buffer.row_bytes == ROW_BYTES
    assert values(buffer, 5, 0, 2) == [1, 2]


def test_size_of_segments():
    buffer = RowBuffer(1, 1024, torch.bfloat16, "cpu", 1 << 30)
    assert buffer.rows_per_segment * 2048 == buffer_module.SEGMENT_BYTES
    assert buffer.max_segments == 32


@given(
    st.lists(st.tuples(st.integers(-1, 3), st.integers(0, 5)), min_size=1, max_size=60),
    st.integers(1, 20),
    st.lists(st.integers(0, 3), max_size=2),
)
def test_agrees_with_a_dictionary(writes: list[tuple[int, int]], max_rows: int, released: list[int]):
    buffer = make_buffer(max_rows)
    expected: dict[tuple[int, int], float] = {}
    for start in range(0, len(writes), 7):
        step = writes[start : start + 7]
        append(buffer, [start + i for i in range(len(step))], [o for o, _ in step], [p for _, p in step])
        expected |= {write: float(start + i) for i, write in enumerate(step)}
    for owner in released:
        buffer.release(owner)
        expected = {(o, p): value for (o, p), value in expected.items() if o != owner}
    for owner in range(4):
        rows = dict(enumerate(values(buffer, owner, 0, 6)))
        assert {p: value for p, value in rows.items() if not math.isnan(value)} == {
            p: value for (o, p), value in expected.items() if o == owner
        }
    # Memory returns with the last owner, and the buffer goes on.
    for owner in range(4):
        buffer.release(owner)
    append(buffer, [], [], [])
    assert buffer.device_bytes == buffer.host_bytes == buffer.num_rows == 0
    append(buffer, [1], [3], [0])
    assert values(buffer, 3, 0, 1) == [1] and buffer.gather(3, 0, 0)[0].shape == (0, 2, 3)
