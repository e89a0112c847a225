"""Prompts from parquet files in veRL's record layout, tokenised and padded.

Legend: B prompts, P ``max_prompt_length``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset, SequentialSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import PreTrainedTokenizerBase

from verl.config.errors import ConfigError
from verl.config.ppo import DataConfig
from verl.data.dataloader import ResumableRandomSampler, whole_batches
from verl.data.records import read_parquet
from verl.protocol import PromptBatch
from verl.rewards.registry import find_scorer

PROMPT_COLUMNS = ["data_source", "prompt", "reward_model"]
"""Required columns of a prompt file; ``extra_info`` is optional."""


@dataclass(frozen=True)
class PromptRecord:
    """One prompt with the inputs of its verifier."""

    uid: int
    """Row number over all files."""
    input_ids: list[int]
    data_source: str
    """Names the verifier."""
    ground_truth: str
    extra_info: Mapping[str, Any]
    messages: list[dict[str, Any]]
    """The chat, as in the file."""


@dataclass(frozen=True)
class TokenizedPrompts:
    """A batch of prompts: the records, and their tokens [B, P]."""

    records: list[PromptRecord]
    tokens: PromptBatch


class PromptDataset(Dataset[PromptRecord]):
    """All prompts of ``files``, tokenised with the chat template when the data set is created.

    Raises:
        ConfigError: a file lacks a column; there are no prompts; no verifier can score a row; or a prompt is too long
            and ``truncation`` is ``error`` (names the file, the row and its length).
    """

    def __init__(
        self, files: Sequence[str], tokenizer: PreTrainedTokenizerBase, max_prompt_length: int, truncation: str
    ) -> None:
        self.records: list[PromptRecord] = []
        for path in files:
            for row_number, row in enumerate(read_parquet(path, PROMPT_COLUMNS)):
                ids: Any = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
                if len(ids) > max_prompt_length:
                    ids = _truncate(ids, max_prompt_length, truncation, f"{path}, row {row_number}")
                check_verifiable(row, f"{path}, row {row_number}")
                self.records.append(
                    PromptRecord(
                        uid=len(self.records),
                        input_ids=ids,
                        data_source=row["data_source"],
                        ground_truth=row["reward_model"]["ground_truth"],
                        extra_info=row.get("extra_info") or {},
                        messages=row["prompt"],
                    )
                )
        if not self.records:
            raise ConfigError(f"{list(files)}: the files contain no prompts; add some")

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> PromptRecord:
        return self.records[index]


class PromptCollator:
    """Pads the prompts of records on the left to [B, P]."""

    def __init__(self, max_prompt_length: int, pad_token_id: int) -> None:
        self.max_prompt_length = max_prompt_length
        self.pad_token_id = pad_token_id

    def __call__(self, records: list[PromptRecord]) -> TokenizedPrompts:
        shape = (len(records), self.max_prompt_length)
        input_ids = torch.full(shape, self.pad_token_id, dtype=torch.int64)
        attention_mask = torch.zeros(shape, dtype=torch.int64)
        for row, record in enumerate(records):
            input_ids[row, -len(record.input_ids) :] = torch.tensor(record.input_ids)
            attention_mask[row, -len(record.input_ids) :] = 1
        uid = torch.tensor([record.uid for record in records])
        return TokenizedPrompts(records, PromptBatch(input_ids, attention_mask, uid, batch_size=[len(records)]))


def train_loader(dataset: PromptDataset, config: DataConfig, pad_token_id: int, seed: int) -> StatefulDataLoader:
    """Batches of exactly ``train_batch_size`` prompts; the incomplete last batch of an epoch is dropped.

    Raises:
        ConfigError: there are fewer prompts than ``train_batch_size``.
    """
    if len(dataset) < config.train_batch_size:
        raise ConfigError(
            f"data.train_batch_size={config.train_batch_size}: there are only {len(dataset)} training prompts; lower it"
        )
    generator = torch.Generator().manual_seed(seed)
    sampler = ResumableRandomSampler(dataset, generator=generator) if config.shuffle else SequentialSampler(dataset)
    collate = PromptCollator(config.max_prompt_length, pad_token_id)
    return whole_batches(dataset, config.train_batch_size, sampler, collate)


def val_batches(
    dataset: PromptDataset, config: DataConfig, pad_token_id: int, multiple: int, seed: int
) -> list[TokenizedPrompts]:
    """All prompts in order, or ``val_sample_size`` of them drawn with ``seed``.

    Batches hold at most ``val_batch_size`` prompts, or more if that is needed to give each at least ``multiple``.

    Raises:
        ConfigError: there are fewer prompts than ``multiple``, one per worker.
    """
    records = dataset.records
    if config.val_sample_size != -1:
        chosen = torch.randperm(len(records), generator=torch.Generator().manual_seed(seed))[: config.val_sample_size]
        records = [records[i] for i in chosen.sort().values.tolist()]
    if len(records) < multiple:
        raise ConfigError(f"data.val_files: {len(records)} prompts cannot be split over {multiple} workers; add some")
    collate = PromptCollator(config.max_prompt_length, pad_token_id)
    num_batches = max(1, min(-(-len(records) // config.val_batch_size), len(records) // multiple))
    bounds = [len(records) * i // num_batches for i in range(num_batches + 1)]
    return [collate(records[a:b]) for a, b in zip(bounds, bounds[1:], strict=False)]


def check_verifiable(row: Mapping[str, Any], where: str) -> None:
    """Raise ``ConfigError`` naming ``where`` unless a verifier or a custom function can score responses to this row."""
    try:
        find_scorer(row["data_source"])
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
    truth = (row["reward_model"] or {}).get("ground_truth")
    if not isinstance(truth, str):
        raise ConfigError(f"{where}: reward_model.ground_truth={truth!r}: must be text")


def _truncate(ids: list[int], length: int, truncation: str, where: str) -> list[int]:
    if truncation == "error":
        raise ConfigError(
            f"data.max_prompt_length={length}: the prompt in {where} has {len(ids)} tokens; raise it, or set "
            "data.truncation=left or right"
        )
    return ids[-length:] if truncation == "left" else ids[:length]
