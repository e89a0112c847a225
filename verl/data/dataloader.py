"""Batches of examples in an order that can be interrupted and resumed in the middle of an epoch."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import Dataset, RandomSampler, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader


def whole_batches(
    dataset: Dataset[Any], batch_size: int, sampler: Sampler[int], collate: Callable[[list[Any]], Any]
) -> StatefulDataLoader:
    """Batches of exactly ``batch_size`` examples; the incomplete last batch of an epoch is dropped."""
    with warnings.catch_warnings():
        # torchdata calls a function that torch has deprecated; users can change neither.
        warnings.filterwarnings("ignore", "'set_vital' is deprecated")
        return StatefulDataLoader(dataset, batch_size, sampler=sampler, collate_fn=collate, drop_last=True)


class ResumableRandomSampler(RandomSampler):
    """torch's :class:`RandomSampler` with the state that ``StatefulDataLoader`` asks for; the order is the same.

    Without that state, the loader would always skip to its position in the first pass, whichever pass it was in.
    """

    def __iter__(self) -> Iterator[int]:
        return _Pass(self)

    def draw(self) -> Iterator[int]:
        """The next pass over all indices; the generator advances when the first index is requested."""
        return super().__iter__()


class _Pass(Iterator[int]):
    """One pass, with the state of its generator at the start."""

    def __init__(self, sampler: ResumableRandomSampler) -> None:
        self.sampler = sampler
        self._begin()

    def _begin(self) -> None:
        self.start = self.sampler.generator.get_state()
        self.indices = self.sampler.draw()
        self.num_yielded = 0

    def __next__(self) -> int:
        index = next(self.indices)
        self.num_yielded += 1
        return index

    def state_dict(self) -> dict[str, Any]:
        """The generator's state before the pass and the number of indices yielded."""
        return {"generator": self.start, "num_yielded": self.num_yielded}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was called."""
        self.sampler.generator.set_state(state["generator"])
        self._begin()
        for _ in range(state["num_yielded"]):
            next(self)
