"""Samplers that shuffle data, mix files or wrap a custom sampler, and that can resume in the middle of an epoch."""

import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset, RandomSampler, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from verl.config.data import DataConfig
from verl.config.errors import ConfigError
from verl.utils.json_state import UserState
from verl.utils.user_code import load_class, user_code


def batch_loader(
    dataset: Dataset[Any], batch_size: int, sampler: Sampler[int], collate: Callable[[list[Any]], Any]
) -> StatefulDataLoader:
    """Return a loader of batches of ``batch_size`` examples. An incomplete last batch of an epoch is dropped."""
    with warnings.catch_warnings():
        # torchdata calls a deprecated function of torch.
        warnings.filterwarnings("ignore", "'set_vital' is deprecated")
        return StatefulDataLoader(dataset, batch_size, sampler=sampler, collate_fn=collate, drop_last=True)


class ResumableRandomSampler(RandomSampler):
    """A :class:`RandomSampler` whose iterators provide the state that ``StatefulDataLoader`` saves.

    Without this state, the loader would always resume in the first epoch.
    """

    def __iter__(self) -> Iterator[int]:
        return _Epoch(self)

    def draw(self) -> Iterator[int]:
        """Return an iterator over the next epoch. The generator advances when the first index is requested."""
        return super().__iter__()


class _Epoch(Iterator[int]):
    """Iterator over the indices of an epoch that stores the generator state at the start of the epoch."""

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
        """Return the generator state at the start of the epoch and the number of indices yielded so far."""
        return {"generator": self.start, "num_yielded": self.num_yielded}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the position saved by :meth:`state_dict`."""
        self.sampler.generator.set_state(state["generator"])
        self._begin()
        for _ in range(state["num_yielded"]):
            next(self)


class MixingSampler(ResumableRandomSampler):
    """Sampler that mixes the files of a concatenated dataset in proportion to ``weights``.

    Each epoch is shuffled and has as many prompts as the dataset. File i contributes ``counts[i]`` prompts, which are
    drawn without replacement until all of the file's prompts have been drawn.
    """

    def __init__(
        self, dataset: Dataset[Any], sizes: Sequence[int], weights: Sequence[float], generator: torch.Generator
    ) -> None:
        super().__init__(dataset, generator=generator)  # type: ignore[arg-type]  # torch only needs a length.
        self.sizes = list(sizes)
        self.counts = shares(sum(sizes), weights)

    def draw(self) -> Iterator[int]:
        """Yield the next epoch's indices. The generator advances when the first index is requested."""
        drawn: list[torch.Tensor] = []
        offset = 0
        for size, count in zip(self.sizes, self.counts, strict=True):
            for begin in range(0, count, max(size, 1)):
                drawn.append(offset + torch.randperm(size, generator=self.generator)[: count - begin])
            offset += size
        indices = torch.cat(drawn)
        yield from indices[torch.randperm(len(indices), generator=self.generator)].tolist()


def shares(total: int, weights: Sequence[float]) -> list[int]:
    """Split ``total`` in proportion to ``weights`` by the largest-remainder method."""
    exact = [total * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: (counts[i] - exact[i], i))
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return counts


class CustomSampler(Sampler[int]):
    """Wrapper that validates a user-defined sampler and its indices.

    Raises ``ConfigError`` if the class cannot be loaded or raises an exception, if the sampler's length is unknown or
    less than the batch size, or if it has only one of ``state_dict`` and ``load_state_dict``.
    """

    def __init__(self, dataset: Dataset[Any], config: DataConfig, seed: int, batch_size: int) -> None:
        path, name = config.sampler.class_path, config.sampler.class_name
        assert path is not None and name is not None
        self.where = f"data.sampler.class_name={name!r}"
        user_class = load_class(path, name, "data.sampler.class_path", "data.sampler.class_name")
        with user_code(f"{self.where}: {name}(dataset, config, seed)"):
            self.inner = user_class(dataset, config, seed)
        with user_code(f"{self.where}: its len()"):
            self.length = len(self.inner)
        self.num_prompts = len(dataset)  # type: ignore[arg-type]  # The dataset has a length.
        self.batch_size = batch_size
        if self.length < batch_size:
            raise ConfigError(
                f"{self.where}: has {self.length} prompts a pass, fewer than {config.batch_field}={batch_size}; lower "
                "that"
            )
        has = (hasattr(self.inner, "state_dict"), hasattr(self.inner, "load_state_dict"))
        self.state = UserState(self.where, self.inner, has)

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return _CustomEpoch(self)

    @property
    def note(self) -> str:
        """Warning that the sampler's state is lost on resuming, or an empty string."""
        if hasattr(self.inner, "update") and not self.state.exists:
            return f"{self.where}: has update but no state_dict, so a resumed run forgets what update was told"
        return ""

    def update(self, outcome: object) -> None:
        """Call the ``update`` method of the custom sampler, if it exists, with a :class:`verl.method.StepOutcome`."""
        if hasattr(self.inner, "update"):
            with user_code(f"{self.where}: its update(outcome)"):
                self.inner.update(outcome)

    def to_index(self, index: Any) -> int:
        """Convert ``index`` to an integer. Raises ``ConfigError`` if ``index`` is not a valid dataset index."""
        try:
            number = operator.index(index)
        except TypeError:
            number = -1
        if not 0 <= number < self.num_prompts:
            raise ConfigError(
                f"{self.where}: yielded {index!r}; it must yield indices of the data set, 0 to {self.num_prompts - 1}"
            )
        return number


class _CustomEpoch(Iterator[int]):
    """Iterator over an epoch of a custom sampler. The epoch starts when its first index is requested."""

    def __init__(self, sampler: CustomSampler) -> None:
        self.sampler = sampler
        self.indices: Iterator[Any] | None = None
        self.num_yielded = 0
        self.resumed = False

    def __next__(self) -> int:
        sampler = self.sampler
        if self.indices is None:
            with user_code(f"{sampler.where}: its iter()"):
                self.indices = iter(sampler.inner)
        with user_code(f"{sampler.where}: its iterator"):
            index = next(self.indices, None)
        if index is None:
            # If an epoch were shorter than a batch, the loader would loop forever.
            if self.num_yielded < sampler.batch_size and not self.resumed:
                raise ConfigError(f"{sampler.where}: ended after {self.num_yielded} prompts, fewer than a batch")
            raise StopIteration
        self.num_yielded += 1
        return sampler.to_index(index)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the custom sampler and the number of indices yielded so far."""
        return {"inner": self.sampler.state.save(), "num_yielded": self.num_yielded}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of the custom sampler or, if it has none, skip the indices that were already yielded."""
        sampler = self.sampler
        if "inner" not in state or (state["inner"] is not None) != sampler.state.exists:
            raise ConfigError(f"{sampler.where}: the checkpoint was written by another sampler; start a new run")
        self.resumed = True
        if sampler.state.exists:
            sampler.state.load(state["inner"])
            self.num_yielded = state["num_yielded"]
            return
        for _ in range(state["num_yielded"]):
            next(self)
