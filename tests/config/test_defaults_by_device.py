"""Options whose default depends on the kind of device."""

from dataclasses import replace

import pytest
from conftest import shipped_config


@pytest.mark.parametrize(
    ("method", "field", "on_cpu", "on_cuda"),
    [("saves_in_background", "async_save", False, True), ("deals_by_counts", "deterministic", True, False)],
)
def test_null_is_decided_by_the_device(method: str, field: str, on_cpu: bool, on_cuda: bool):
    trainer = shipped_config().trainer
    assert getattr(trainer, field) is None
    assert (getattr(trainer, method)("cpu"), getattr(trainer, method)("cuda")) == (on_cpu, on_cuda)
    for wanted in (True, False):
        chosen = replace(trainer, **{field: wanted})
        assert getattr(chosen, method)("cpu") is getattr(chosen, method)("cuda") is wanted
