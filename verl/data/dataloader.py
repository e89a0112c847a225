"""Batches of examples in an order that can be left in the middle and taken up again."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import Dataset, RandomSampler, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader


def whole_batches(
    dataset: Dataset, batch_size: int, sampler: Sampler[int], collate: Callable[[list[Any]], Any]
) -> StatefulDataLoader:
    """Batches of exactly ``batch_size`` examples; an epoch's incomplete last batch is left out."""
    with warnings.catch_warnings():
        # torchdata still calls what torch no longer does anything in; a user can change neither.
        warnings.filterwarnings("ignore", "'set_vital' is deprecated")
        return StatefulDataLoader(dataset, batch_size, sampler=sampler, collate_fn=collate, drop_last=True)


class ResumableRandomSampler(RandomSampler):
    """torch's :class:`RandomSampler` with the state that ``StatefulDataLoader`` asks of it; the order is the same.

    Without that state the loader would skip to its position in the order of the generator's first pass, whichever pass
    it was in.
    """

    def __iter__(self) -> Iterator[int]:
        return _Pass(self)

    def draw(self) -> Iterator[int]:
        """The next pass over all indices; the generator moves on when the first of them is asked for."""
        return super().__iter__()


class _Pass(Iterator[int]):
    """One pass, which knows where its generator stood when it began."""

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
        """The generator's state before the pass and the number of indices given."""
        return {"generator": self.start, "num_yielded": self.num_yielded}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go where :meth:`state_dict` was asked."""
        self.sampler.generator.set_state(state["generator"])
        self._begin()
        for _ in range(state["num_yielded"]):
            next(self)
