import pytest

from verl.config.errors import ConfigError
from verl.trainer.logging.step_profiler import check_profile_steps


def test_a_step_that_the_run_does_not_have_is_refused():
    check_profile_steps([1, 5], 5)
    check_profile_steps([], 1)
    with pytest.raises(ConfigError, match=r"trainer.profile_steps=\[2, 7\]: the run has 5 steps; leave out \[7\]"):
        check_profile_steps([2, 7], 5)
