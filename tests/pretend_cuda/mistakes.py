"""Deliberate mistakes in the paths of ``paths.py``, each of which must be detected."""

from typing import Any
from unittest import mock

from tests.pretend_cuda.paths import LAYOUTS, OFFLOADED, DevicePath, scoring, taking, update  # isort: skip  # before torch

import torch
from torch import Tensor

from tests.pretend_cuda.pretend import GPU
from verl.algorithms.losses import POLICY_LOSSES


def offsets_of_64_bits(gpu: GPU) -> None:
    """Offsets of rows that the kernel cannot read."""
    bounds = lambda lengths: torch.cat([lengths.new_zeros(1), lengths.cumsum(dim=0)])  # noqa: E731
    with mock.patch("verl.models.packing._bounds", bounds):
        scoring(gpu, *LAYOUTS["packed"])


def positions_on_the_host(gpu: GPU) -> None:
    """Positions of tokens that stay on the CPU."""
    with mock.patch("verl.models.packing.to_device", lambda values, _: values):
        scoring(gpu, *LAYOUTS["padded"])


def a_number_looked_at(gpu: GPU) -> None:
    """A loss that looks at a number."""
    original = POLICY_LOSSES["ppo_clip"]

    def looking(logprobs: Tensor, *args: Any, **kwargs: Any) -> Any:
        assert logprobs.mean().item() < 0
        return original(logprobs, *args, **kwargs)

    with mock.patch.dict(POLICY_LOSSES, ppo_clip=looking):
        update(gpu, *LAYOUTS["packed"])


def results_read_too_early(gpu: GPU) -> None:
    """A copy that nobody waited for."""
    with mock.patch("tests.pretend_cuda.pretend.Event.query", lambda _: True):
        taking(gpu)


def memory_freed_too_early(gpu: GPU) -> None:
    """Parameters that leave the device while it may still be reading them."""
    with mock.patch.object(torch.cuda, "synchronize"):
        update(gpu, *LAYOUTS["packed"], *OFFLOADED)


def draws_by_the_host(_: GPU) -> None:
    """A generator of the CPU."""
    torch.rand(3, device="cuda", generator=torch.Generator())


SEEDED: tuple[Any, ...] = (offsets_of_64_bits, positions_on_the_host, a_number_looked_at, results_read_too_early)
SEEDED += (memory_freed_too_early, draws_by_the_host)
MISTAKES: dict[str, DevicePath] = {f"mistake: {function.__name__.replace('_', ' ')}": function for function in SEEDED}
