from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizer import make_tiny_tokenizer

from tests.kit import data_options
from verl.config import DataConfig
from verl.data.prompt_rows import PromptRecord
from verl.data.prompts import PromptDataset, train_loader, val_batches
from verl.data.records import RL_SCHEMA, rl_record, write_parquet

TOKENIZER = make_tiny_tokenizer()
# Ids: <|pad|> 0, <|im_end|> 2, <|user|> 4, <|assistant|> 5, "1" 22, "+" 16, "2" 23.
SHORT = [4, 22, 2, 5]
LONG = [4, 22, 16, 23, 2, 5]


def write_prompts(path: Path, questions: list[str]) -> str:
    records = [
        rl_record(data_source="arithmetic", question=q, ground_truth=f"={q}", split="train", index=i)
        for i, q in enumerate(questions)
    ]
    write_parquet(path, records, RL_SCHEMA)
    return str(path)


def data_config(**changes: Any) -> DataConfig:
    """Batches of two prompts of at most eight tokens."""
    small = {"train_batch_size": 2, "val_batch_size": 4, "max_prompt_length": 8, "max_response_length": 8}
    return data_options(**(small | changes))


def dataset_of(folder: Path, num_prompts: int) -> PromptDataset:
    path = write_prompts(folder / "p.parquet", [str(i) for i in range(num_prompts)])
    return PromptDataset([path], TOKENIZER, data_config())


def uids(batches: list[list[PromptRecord]]) -> list[int]:
    return [record.uid for batch in batches for record in batch]


def test_prompts_are_tokenized_and_numbered(tmp_path: Path):
    files = [write_prompts(tmp_path / "a.parquet", ["1", "1+2"]), write_prompts(tmp_path / "b.parquet", ["3"])]
    (records,) = val_batches(PromptDataset(files, TOKENIZER, data_config()), data_config(), seed=0)
    assert [record.input_ids for record in records[:2]] == [SHORT, LONG]
    found = [(record.uid, record.data_source, record.ground_truth) for record in records]
    assert found == [(0, "arithmetic", "=1"), (1, "arithmetic", "=1+2"), (2, "arithmetic", "=3")]
    assert records[2].extra_info["question"] == "3"


def test_prompt_that_is_too_long_is_refused(tmp_path: Path, refused):
    path = write_prompts(tmp_path / "a.parquet", ["1", "1+2"])
    line = "data.max_prompt_length=5: the prompt in TMP/a.parquet, row 1 has 6 tokens; raise it, or set "
    with refused(line + "data.truncation=filter, left, right or middle"):
        PromptDataset([path], TOKENIZER, data_config(max_prompt_length=5))


@pytest.mark.parametrize(
    ("limit", "truncation", "expected"),
    [
        (6, "error", LONG),
        (4, "left", LONG[2:]),
        (4, "right", LONG[:4]),
        # The larger half is the end's, as in veRL.
        (5, "middle", LONG[:2] + LONG[3:]),
        (1, "middle", LONG[5:]),
    ],
)
def test_truncation_drops_the_named_side(tmp_path: Path, limit: int, truncation: str, expected: list[int]):
    config = data_config(max_prompt_length=limit, truncation=truncation)
    dataset = PromptDataset([write_prompts(tmp_path / "a.parquet", ["1+2"])], TOKENIZER, config)
    assert dataset[0].input_ids == expected


def test_files_without_prompts_are_refused(tmp_path: Path, refused):
    path = write_prompts(tmp_path / "a.parquet", [])
    with refused("...the files contain no prompts..."):
        PromptDataset([path], TOKENIZER, data_config())


def test_batches_have_the_size_of_a_generation_batch(tmp_path: Path, refused):
    config = data_config(train_batch_size=2, gen_batch_size=5)
    loader = train_loader(dataset_of(tmp_path, 12), config, seed=0)
    assert [len(batch) for batch in loader] == [5, 5] and len(loader) == 2
    assert [len(batch) for batch in train_loader(dataset_of(tmp_path, 12), config, seed=0, candidates=2)] == [10]
    with refused("data.gen_batch_size=5: there are only 3 training prompts; lower it"):
        train_loader(dataset_of(tmp_path, 3), config, seed=0)
    with refused("data.gen_batch_size=5 times 2 candidates a prompt ...: there are only 9..."):
        train_loader(dataset_of(tmp_path, 9), config, seed=0, candidates=2)


def epochs(dataset: PromptDataset, seed: int, shuffle: bool = True) -> list[list[list[int]]]:
    """The uids of two epochs, batch by batch."""
    loader = train_loader(dataset, data_config(train_batch_size=4, shuffle=shuffle), seed=seed)
    return [[uids([batch]) for batch in loader] for _ in range(2)]


def test_order_depends_on_the_seed_and_the_epoch(tmp_path: Path):
    dataset = dataset_of(tmp_path, 12)
    first, second = epochs(dataset, seed=0)
    assert sorted(sum(first, [])) == sorted(sum(second, [])) == list(range(12))
    assert first != second
    assert [first, second] == epochs(dataset, seed=0)
    assert [first, second] != epochs(dataset, seed=1)


def test_unshuffled_batches_follow_the_file(tmp_path: Path):
    expected = [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert epochs(dataset_of(tmp_path, 10), seed=0, shuffle=False) == [expected, expected]


@pytest.mark.parametrize(
    ("num_prompts", "val_batch_size", "sizes"),
    [
        (4, 4, [4]),
        (10, 4, [3, 3, 4]),
        (5, 4, [2, 3]),
        (3, 1, [1, 1, 1]),
        (3, 100, [3]),
    ],
)
def test_validation_batches(tmp_path: Path, num_prompts: int, val_batch_size: int, sizes: list[int]):
    config = data_config(val_batch_size=val_batch_size)
    batches = val_batches(dataset_of(tmp_path, num_prompts), config, seed=0)
    assert [len(batch) for batch in batches] == sizes
    assert uids(batches) == list(range(num_prompts))


def test_a_sample_of_the_validation_prompts(tmp_path: Path):
    dataset, config = dataset_of(tmp_path, 20), data_config(val_batch_size=4, val_sample_size=6)
    drawn = {seed: uids(val_batches(dataset, config, seed=seed)) for seed in (0, 1)}
    assert [len(set(some)) for some in drawn.values()] == [6, 6]
    assert drawn[0] != drawn[1] and drawn[0] == sorted(drawn[0])
    more = data_config(val_batch_size=100, val_sample_size=100)
    assert uids(val_batches(dataset, more, seed=0)) == list(range(20))
