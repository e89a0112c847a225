from itertools import islice

import pytest

from verl.trainer.schedule import endless, is_due, numbered_batches


def test_batches_are_numbered_across_epochs():
    assert list(islice(endless("ab"), 5)) == ["a", "b", "a", "b", "a"]
    assert list(numbered_batches("abc", 0, 5)) == [(1, "a"), (2, "b"), (3, "c"), (4, "a"), (5, "b")]
    assert list(numbered_batches("abc", 2, 4)) == [(3, "a"), (4, "b")]


@pytest.mark.parametrize(("frequency", "due"), [(3, [3, 6, 7]), (0, [7]), (-1, [])])
def test_due_at_multiples_and_at_the_end(frequency: int, due: list[int]):
    assert [step for step in range(1, 8) if is_due(step, 7, frequency)] == due
