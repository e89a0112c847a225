"""The order of training prompts: mixtures, and samplers of a researcher's own, interrupted and resumed."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import SequentialSampler

from tests.kit import data_options, documented, stored, user_code
from tests.tables import refusals
from verl.config import DataConfig
from verl.config.data import SamplerConfig
from verl.data.samplers import CustomSampler, MixingSampler, ResumableRandomSampler, batch_loader, shares
from verl.method import StepOutcome

ORDERS = f"""{documented("data", "my_order.py")}

class Backwards:
    def __init__(self, dataset, config, seed):
        self.size = len(dataset)

    def __len__(self):
        return self.size

    def __iter__(self):
        return iter(range(self.size - 1, -1, -1))
"""


class Numbers(list[int]):
    """A data set."""


def config_of(tmp_path: Path, name: str, source: str = ORDERS, batch: int = 2) -> DataConfig:
    path = user_code(tmp_path, source, "orders.py")
    return data_options(train_batch_size=batch, sampler=SamplerConfig(path, name))


def loader_of(config: DataConfig, num: int = 7) -> Any:
    dataset = Numbers(range(num))
    return batch_loader(
        dataset, config.train_batch_size, CustomSampler(dataset, config, 0, config.train_batch_size), list
    )


@pytest.mark.parametrize(
    ("weights", "counts"),
    [([1, 1, 1], [4, 3, 3]), ([1, 0, 0], [10, 0, 0]), ([0.7, 0.2, 0.1], [7, 2, 1]), ([5, 3, 1], [6, 3, 1])],
)
def test_shares_of_a_mixture(weights: list[float], counts: list[int]):
    assert shares(10, weights) == counts


def test_mixture_repeats_after_all_prompts_of_a_file():
    sampler = MixingSampler(Numbers(range(10)), [2, 8], [1, 1], torch.Generator().manual_seed(0))
    first, second = list(sampler), list(sampler)
    for order in (first, second):
        times = Counter(order)
        # Five of ten from a file of two: each twice, one of them once more. The other file gives each at most once.
        assert sorted(times[i] for i in (0, 1)) == [2, 3]
        assert sum(times[i] for i in range(2, 10)) == 5 and max(times[i] for i in range(2, 10)) == 1
    assert first != second
    again = MixingSampler(Numbers(range(10)), [2, 8], [1, 1], torch.Generator().manual_seed(0))
    assert [list(again), list(again)] == [first, second]


def batches(loader: Any, count: int, accuracy: float | None = None) -> list[list[int]]:
    """The next batches, pass after pass; with ``accuracy``, each is reported to the sampler."""
    found: list[list[int]] = []
    while True:
        for batch in loader:
            found.append(batch)
            if accuracy is not None:
                shares_of = [1.0 if index % 3 == 0 else accuracy for index in batch]
                loader.sampler.update(StepOutcome(len(found), batch, shares_of, shares_of, {}))
            if len(found) == count:
                return found


# Three batches a pass of seven, two of five and one of three; one example is left out of each.
@pytest.mark.parametrize("size", [7, 5, 3])
@pytest.mark.parametrize("done", [0, 1, 3, 4, 5, 6])
@pytest.mark.parametrize("kind", ["shuffled", "sequential", "mixture", "HardestFirst", "Backwards"])
def test_interrupted_pass_resumes(tmp_path: Path, kind: str, done: int, size: int):
    def make() -> Any:
        data, generator = Numbers(range(size)), torch.Generator().manual_seed(3)
        if kind in ("HardestFirst", "Backwards"):
            return loader_of(config_of(tmp_path, kind), size)
        samplers = {
            "shuffled": ResumableRandomSampler(data, generator=generator),
            "sequential": SequentialSampler(data),
            "mixture": MixingSampler(data, [2, size - 2], [1, 1], generator),
        }
        return batch_loader(data, 2, samplers[kind], list)

    accuracy = 0.0 if kind == "HardestFirst" else None
    whole = batches(make(), 9, accuracy)
    interrupted, resumed = make(), make()
    assert done == 0 or batches(interrupted, done, accuracy) == whole[:done]
    resumed.load_state_dict(stored(interrupted.state_dict()))
    assert batches(resumed, 9 - done, accuracy) == whole[done:]


def test_curriculum_gets_the_outcomes(tmp_path: Path):
    # Three batches a pass of seven; 0, 3 and 6 went well and come last in the second one.
    assert batches(loader_of(config_of(tmp_path, "HardestFirst")), 6, 0.0)[3:] == [[1, 2], [4, 5], [6, 0]]
    assert batches(loader_of(config_of(tmp_path, "Backwards")), 4) == [[6, 5], [4, 3], [2, 1], [6, 5]]


LISTED = "class A(list):\n  def __init__(self, *_): super().__init__({})\n  "


# tests/utils/test_user_code.py has what loading and calling it may raise.
@pytest.mark.parametrize(("prompts", "source", "line"), refusals("data/refusals.txt", "samplers"))
def test_mistake_of_a_sampler_is_named(tmp_path: Path, refused, prompts: str, source: str, line: str):
    code = (LISTED.format(prompts) if prompts else "class A:\n  ") + source
    with refused(line):
        batches(loader_of(config_of(tmp_path, "A", code)), 1, 0.0)


def test_curriculum_without_state_is_noted(tmp_path: Path):
    config = config_of(tmp_path, "A", f"{LISTED.format([0, 1])}def update(self, _): pass")
    assert CustomSampler(Numbers(range(7)), config, 0, 2).note == (
        "data.sampler.class_name='A': has update but no state_dict, so a resumed run forgets what update was told"
    )
    assert CustomSampler(Numbers(range(7)), config_of(tmp_path, "Backwards"), 0, 2).note == ""
