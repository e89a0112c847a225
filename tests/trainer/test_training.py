"""What the training loops share: when something is due, and optimizer steps that were skipped."""

import math
from dataclasses import replace
from itertools import islice

import pytest

from verl.config import PPOConfig
from verl.config.errors import ConfigError
from verl.trainer.training import SkippedUpdates, endless, is_due


@pytest.mark.parametrize(("frequency", "due"), [(3, [3, 6, 7]), (0, [7]), (-1, [])])
def test_due_at_multiples_and_at_the_end(frequency: int, due: list[int]):
    assert [step for step in range(1, 8) if is_due(step, 7, frequency)] == due
    assert list(islice(endless("ab"), 5)) == ["a", "b", "a", "b", "a"]


def update(skipped: bool, loss: float = math.nan) -> dict[str, float]:
    return {"actor/pg_loss": loss, "actor/skipped_updates": float(skipped)}


def test_means_are_those_of_the_updates_that_were_applied(small_config: PPOConfig):
    skipped = SkippedUpdates("actor", "actor.optim", small_config.actor.optim)
    found = skipped.summarise([update(False, 1.0), update(True), update(True), update(False, 4.0)], step=1)
    assert found == {"actor/pg_loss": 2.5, "actor/skipped_updates": 2.0}
    assert skipped.summarise([update(True)], step=2) == {"actor/skipped_updates": 1.0}
    # A step that learns from nothing has no updates.
    assert skipped.summarise([], step=3) == {}


def test_too_many_in_a_row_end_the_run(small_config: PPOConfig):
    optim = replace(small_config.actor.optim, lr=0.5, max_skipped_updates=2)
    skipped = SkippedUpdates("actor", "actor.optim", optim)
    skipped.summarise([update(True), update(True), update(False, 0.0), update(True)], step=1)
    skipped.summarise([update(True)], step=2)
    with pytest.raises(ConfigError) as error:
        skipped.summarise([update(True), update(False, 0.0)], step=3)
    assert str(error.value).startswith(
        "actor.optim.max_skipped_updates=2: the gradients of 3 optimizer steps in a row were not finite, the last in "
        "step 3; lower actor.optim.lr=0.5"
    )
    with pytest.raises(ConfigError, match="=0: the gradients of 1 optimizer steps"):
        SkippedUpdates("actor", "x", replace(optim, max_skipped_updates=0)).summarise([update(True)], step=1)
