"""Dataset of prompts and its batch loaders."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset, Sampler, SequentialSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import PreTrainedTokenizerBase

from verl.config.data import DataConfig, generated_set
from verl.config.errors import ConfigError
from verl.data.files import read_rows
from verl.data.prompt_record import Begin, PromptRecord
from verl.data.prompt_rows import PromptReader, read_extra_info
from verl.data.reasoning_gym import generated_rows
from verl.data.records import split_solution
from verl.data.samplers import CustomSampler, MixingSampler, ResumableRandomSampler, batch_loader
from verl.rewards.registry import custom_columns
from verl.utils.user_code import load_class, user_code

UNSCORED = "environment"
"""Default data source of prompts whose responses are scored by an environment."""

COLUMN_OPTIONS = (
    "data.prompt_key, data.answer_key, and data.reward_fn_key or data.data_source, the verifier (data.prompt_key="
    'question data.answer_key=answer data.data_source=math for {"question": "1 + 1?", "answer": "2"}),'
)
"""Part of an error message that lists the options for column names and gives an example."""


class PromptDataset(Dataset[PromptRecord]):
    """Dataset of the prompts in ``files``, which are tokenized at construction.

    Args:
        max_samples: number of prompts to use, or -1 for all. The prompts are chosen from all files with ``seed`` or, if
            ``data.shuffle=false``, are the first ones.
        scored: whether verifiers score the responses. In this case, rows need a data source and a ground truth.
        begin: function that adds what environments say first, and their tools, to records before they are tokenized.

    Raises ``ConfigError`` if a file cannot be read or lacks a column; if no prompt is short enough; or if a row is
    malformed, does not fit ``data.template``, is too long, or cannot be scored. The message names the file and row.
    """

    def __init__(
        self,
        files: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        config: DataConfig,
        max_samples: int = -1,
        seed: int = 0,
        scored: bool = True,
        begin: Begin | None = None,
    ) -> None:
        sources = _read_sources(files, config, scored, begin is not None)
        selection = _select([len(rows) for _, rows in sources], max_samples, config.shuffle, seed)
        reader = PromptReader(config, tokenizer, scored)
        self.sizes: list[int] = []
        """Number of prompts from each file, in the order of the files."""
        for (name, rows), numbers in zip(sources, selection, strict=True):
            before, places = len(reader.records), [f"{name}, row {number}" for number in numbers]
            records = [reader.read(rows[number], place) for number, place in zip(numbers, places, strict=True)]
            for record, place in zip(begin(records, places) if begin is not None else records, places, strict=True):
                reader.add(record, place)
            self.sizes.append(len(reader.records) - before)
        reader.check_any_left(files)
        self.records = reader.records
        self.notes = reader.notes()
        """Notes for the user about the prompts, one line each."""

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> PromptRecord:
        return self.records[index]


def _read_sources(
    files: Sequence[str], config: DataConfig, scored: bool, whole_rows: bool = False
) -> list[tuple[str, Sequence[Mapping[str, Any]]]]:
    """Return the name and rows of each file or, if configured, of the custom dataset class."""
    layout = PromptLayout(config.prompt_key, config.reward_fn_key, config.answer_key, config.data_source)
    layout = layout._replace(generated=config.generated, whole_rows=whole_rows)
    path, name = config.custom_cls.path, config.custom_cls.name
    if path is None or name is None:
        return [(file, layout.read(file, scored)) for file in files]
    where = f"data.custom_cls.name={name!r}"
    user_class = load_class(path, name, "data.custom_cls.path", "data.custom_cls.name")
    with user_code(f"{where}: {name}(files, config)"):
        records = user_class(list(files), config)
    with user_code(f"{where}: its iterator"):
        rows = list(records)
    for number, row in enumerate(rows):
        missing = [column for column in layout.columns(scored) if not isinstance(row, Mapping) or column not in row]
        if missing:
            raise ConfigError(f"{where}: its record {number} lacks {missing}; it must be a mapping: {str(row):.80}")
    return [(where, [layout.completed(row, scored) for row in rows])]


class PromptLayout(NamedTuple):
    """Column names in prompt files, and defaults for missing columns. The fields are named like options in ``data``."""

    prompt_key: str = "prompt"
    reward_fn_key: str = "data_source"
    answer_key: str | None = None
    data_source: str | None = None
    generated: Mapping[str, Mapping[str, Any]] = {}
    """Maps the name of each generated dataset to its options."""
    whole_rows: bool = False
    """Whether to add all other columns to ``extra_info``, for environments that are initialized from a row."""

    def columns(self, scored: bool = True) -> list[str]:
        """Return the required columns, which are only the prompt column if no verifier scores the responses."""
        if not scored:
            return [self.prompt_key]
        source = [self.reward_fn_key] if self.data_source is None else []
        return [self.prompt_key, self.answer_key or "reward_model", *source]

    def read(self, file: str, scored: bool = True) -> list[Mapping[str, Any]]:
        """Return the rows of a file or generated dataset, with missing columns filled in."""
        generated = generated_set(file, self.generated)
        if generated is not None:
            names = {"prompt": self.prompt_key, "data_source": self.reward_fn_key}
            rows = [{names.get(k, k): v for k, v in row.items()} for row in generated_rows(file, generated)]
            return [self._replace(answer_key=None).completed(row, scored) for row in rows]
        rows = read_rows(file, self.columns(scored), COLUMN_OPTIONS, [self.prompt_key, "tools"])
        return [self.completed(row, scored) for row in rows]

    def completed(self, row: Mapping[str, Any], scored: bool = True) -> Mapping[str, Any]:
        """Fill in missing optional columns and the columns that ``answer_key`` and ``data_source`` provide.

        Columns that match parameters of a custom reward function are added to ``extra_info``. The prompt always matches
        the parameter ``prompt``, even if its column has a different name and another column is called ``prompt``.
        """
        if not scored:
            row = {"reward_model": None, **row, self.reward_fn_key: row.get(self.reward_fn_key) or UNSCORED}
        if self.answer_key is not None and (scored or self.answer_key in row):
            answer = row[self.answer_key]
            answer = split_solution(answer)[0] if isinstance(answer, str) else answer
            row = {**row, "reward_model": {"ground_truth": answer}}
        if self.data_source is not None and row.get(self.reward_fn_key) is None:
            row = {**row, self.reward_fn_key: self.data_source}
        if self.whole_rows:
            known = (self.prompt_key, self.reward_fn_key, "reward_model", "extra_info", "tools")
            others = {name: value for name, value in row.items() if name not in known}
            row = {**row, "extra_info": {**others, **read_extra_info(row.get("extra_info"))}}
        if columns := custom_columns(row[self.reward_fn_key], {**row, "prompt": row.get(self.prompt_key)}):
            row = {**row, "extra_info": {**columns, **read_extra_info(row.get("extra_info"))}}
        return row


def _select(sizes: Sequence[int], max_samples: int, shuffle: bool, seed: int) -> list[list[int]]:
    """Return the indices of the selected rows of each file, in ascending order."""
    total = sum(sizes)
    if max_samples == -1 or max_samples >= total:
        return [list(range(size)) for size in sizes]
    rows = torch.arange(max_samples)
    if shuffle:
        rows = torch.randperm(total, generator=torch.Generator().manual_seed(seed))[:max_samples].sort().values
    ends = torch.tensor(sizes).cumsum(0)
    parts = [rows[(rows >= end - size) & (rows < end)] - (end - size) for size, end in zip(sizes, ends, strict=True)]
    return [part.tolist() for part in parts]


def train_loader(dataset: PromptDataset, config: DataConfig, seed: int, candidates: int = 1) -> StatefulDataLoader:
    """Return a loader whose batches are lists of exactly ``prompts_per_batch * candidates`` prompts.

    An incomplete last batch of an epoch is dropped.

    Raises ``ConfigError`` if there are too few prompts for one batch, or if ``data.sampler`` cannot be used.
    """
    size = config.prompts_per_batch * candidates
    if len(dataset) < size:
        times = f" times {candidates} candidates a prompt (trainer.method)" if candidates > 1 else ""
        mini = ", and actor.ppo_mini_batch_size with it" if config.batch_field == "data.train_batch_size" else ""
        raise ConfigError(
            f"{config.batch_field}={config.prompts_per_batch}{times}: there are only {len(dataset)} training prompts; "
            f"lower it{mini}"
        )
    return batch_loader(dataset, size, _sampler(dataset, config, seed, size), list)


def _sampler(dataset: PromptDataset, config: DataConfig, seed: int, batch_size: int) -> Sampler[int]:
    generator = torch.Generator().manual_seed(seed)
    if config.sampler.class_path is not None:
        custom = CustomSampler(dataset, config, seed, batch_size)
        dataset.notes.extend([custom.note] if custom.note else [])
        return custom
    if config.train_weights:
        mixture = MixingSampler(dataset, dataset.sizes, config.train_weights, generator)
        field = f"data.train_weights={config.train_weights}"
        for i, file in enumerate(config.train_files):
            if config.train_weights[i] and not dataset.sizes[i]:
                raise ConfigError(f"{field}: no prompt of {file} is left to draw")
            if config.train_weights[i] and not mixture.counts[i]:
                raise ConfigError(
                    f"{field}: the share of {file} in an epoch of {len(dataset)} prompts is none; raise it"
                )
        return mixture
    return ResumableRandomSampler(dataset, generator=generator) if config.shuffle else SequentialSampler(dataset)


def val_batches(dataset: PromptDataset, config: DataConfig, seed: int) -> list[list[PromptRecord]]:
    """Return batches of all prompts, or of ``val_sample_size`` prompts drawn with ``seed``, in dataset order.

    Batches have nearly equal sizes of at most ``val_batch_size``.
    """
    records = dataset.records
    if config.val_sample_size != -1:
        drawn = torch.randperm(len(records), generator=torch.Generator().manual_seed(seed))[: config.val_sample_size]
        records = [records[i] for i in drawn.sort().values.tolist()]
    num_batches = math.ceil(len(records) / config.val_batch_size)
    bounds = [len(records) * i // num_batches for i in range(num_batches + 1)]
    return [records[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
