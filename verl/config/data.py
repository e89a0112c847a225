"""Options for prompt data: files, templates and batches."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from verl.config.checks import NAMES_ONE, CountOrAll, Group, NotNegativeFloat, PositiveInt, require

FILE_SUFFIXES = (".parquet", ".jsonl", ".json")
"""Suffixes of supported data files."""

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(@[\w./-]+)?")
_HUB_CONFIG = re.compile(r"[\w.-]*")

CHAT_ARGUMENTS = {
    *("conversation", "messages", "chat_template", "tokenize", "tokenizer_kwargs", "return_dict", "return_tensors"),
    *("return_assistant_tokens_mask", "add_generation_prompt", "continue_final_message"),
    *("padding", "truncation", "max_length"),
}
"""Arguments of ``apply_chat_template`` that users cannot set, mostly because they truncate or pad prompts."""


class HubSet(NamedTuple):
    """A split of a data set on the Hugging Face hub."""

    hub_id: str
    config: str
    """Name of the configuration, or empty for the only or default one."""
    split: str
    revision: str = ""
    """Branch, tag or commit, or empty for ``main``."""


def hub_set(name: str) -> HubSet | None:
    """Return the data set for ``owner/name``, ``owner/name:split`` or ``owner/name:config:split``, or None for a file.

    The name may be followed by a branch, ``owner/name@branch``. The split defaults to ``train``. A path below ``data/``
    always denotes a file, even if the file is missing.
    """
    hub_id, *rest = name.split(":", 2)
    config, split = (["", "train"], ["", *rest], rest)[len(rest)]
    is_file = hub_id.endswith(FILE_SUFFIXES) or Path(name).is_file() or hub_id.startswith("data/")
    if is_file or not (_HUB_ID.fullmatch(hub_id) and _HUB_CONFIG.fullmatch(config)):
        return None
    hub_id, _, revision = hub_id.partition("@")
    return HubSet(hub_id, config, split, revision)


GENERATOR = "reasoning_gym:"
"""Beginning of the names of generated data sets."""


class GeneratedSet(NamedTuple):
    """A data set that reasoning-gym generates. Its problem ``i`` is drawn with the seed ``seed + i``."""

    dataset: str
    """Name of the generator."""
    seed: int
    size: int
    options: Mapping[str, Any]
    """Further options of the generator."""

    @property
    def end(self) -> int:
        """Seed after that of the last problem."""
        return self.seed + self.size


def generated_set(name: str, entries: Mapping[str, Mapping[str, Any]]) -> GeneratedSet | None:
    """Return the data set ``reasoning_gym:KEY``, described by the entry ``KEY``, or None for other names.

    Raises ``ConfigError`` if the entry is not a mapping, or its seed or size is not an integer in range.
    """
    if not name.startswith(GENERATOR):
        return None
    key = name.removeprefix(GENERATOR)
    entry = entries.get(key, {})
    require(isinstance(entry, Mapping), f"generated.{key}", entry, "must be a mapping, {option: value}")
    options = {"dataset": key, "seed": 0, "size": 500, **entry}
    for option, least in {"seed": 0, "size": 1}.items():
        fits = type(options[option]) is int and options[option] >= least
        require(fits, f"generated.{key}.{option}", options[option], f"must be an integer of at least {least}")
    return GeneratedSet(str(options.pop("dataset")), options.pop("seed"), options.pop("size"), options)


def _check_chat_arguments(field: str, arguments: dict[str, Any]) -> None:
    taken = sorted(CHAT_ARGUMENTS & arguments.keys())
    require(not taken, field, arguments, f"{', '.join(taken)} cannot be set here; leave it out")


ChatArguments = Annotated[dict[str, Any], _check_chat_arguments]


@dataclass(frozen=True)
class CustomDatasetConfig(Group):
    """A custom class that yields prompt records; docs/data.md describes its protocol."""

    path: str | None
    """File (``my_prompts.py``) or module (``my_package.prompts``) of the class; null uses the prompt files."""
    name: str | None
    """Name of the class."""

    def check(self) -> None:
        both = (self.path is None) == (self.name is None)
        self.require(both, "name", f"path={self.path!r}: set both path and name, or neither")


@dataclass(frozen=True)
class SamplerConfig(Group):
    """A custom class that orders the training prompts, such as a curriculum; docs/data.md describes its protocol.

    If ``async_training.max_staleness`` is above 0, it receives a step's results after later prompts have been drawn."""

    class_path: str | None
    """File or module of the class, or null for a random order (file order with ``data.shuffle=false``)."""
    class_name: str | None
    """Name of the class."""

    def check(self) -> None:
        both = (self.class_path is None) == (self.class_name is None)
        fix = f"class_path={self.class_path!r}: set both class_path and class_name, or neither"
        self.require(both, "class_name", fix)


@dataclass(frozen=True)
class DataConfig(Group):
    """Options for prompt data and batches."""

    train_files: Annotated[list[str], NAMES_ONE]
    """Training prompts in veRL's record layout: ``.parquet``, ``.jsonl`` or ``.json`` files, or data sets on the
    Hugging Face hub as ``owner/name``, ``owner/name:split`` or ``owner/name:config:split``. ``reasoning_gym:NAME``
    generates problems (``generated``)."""
    val_files: list[str]
    """Validation prompts, in the same format as ``train_files``; an empty list disables validation."""
    generated: dict[str, dict[str, Any]]
    """Options of each ``reasoning_gym:NAME`` in ``train_files`` and ``val_files``, by ``NAME``: ``dataset``, the
    generator (by default ``NAME`` itself), ``size`` (500 problems), ``seed`` (0), and those of the generator."""
    train_weights: list[NotNegativeFloat]
    """Relative weights of ``train_files`` in an epoch, each at least 0. An epoch has as many prompts as all files
    together, so prompts of a file with a large weight repeat. An empty list uses every prompt once per epoch."""
    train_max_samples: CountOrAll
    """Total number of training prompts to use: a random subset determined by ``seed``, or the first prompts if
    ``shuffle=false``; -1 uses all prompts."""
    prompt_key: str
    """Column of prompts: chats, ``[{"role": ..., "content": ...}]``, or text, which becomes a user message."""
    reward_fn_key: str
    """Column that names the verifier of each row."""
    answer_key: str | None
    """Column of the answers, or null for ``ground_truth`` in the column ``reward_model``. Of a solution that ends in
    ``#### 12``, as GSM8K's do, the answer is ``12``."""
    data_source: str | None
    """Verifier of rows without the column ``reward_fn_key``, such as ``gsm8k`` or ``math``; null refuses such rows."""
    template: str
    """Format of prompts. ``chat`` applies the tokenizer's chat template to all messages; ``raw`` leaves the text
    unchanged; other keys of ``verl.data.templates.TEMPLATES`` insert the text as the question. All but ``chat`` require
    text or a single user message. Responses end at the template's stop tokens and strings."""
    apply_chat_template_kwargs: ChatArguments
    """Arguments of the tokenizer's chat template: ``+data.apply_chat_template_kwargs.enable_thinking=false``."""
    train_batch_size: PositiveInt
    """Number of prompts per training step over all workers."""
    gen_batch_size: PositiveInt | None
    """Number of prompts per generation batch of dynamic sampling (``algorithm.filter_groups``) over all workers, or
    null for ``train_batch_size``. With larger batches, a step needs fewer rounds. Surplus prompts are dropped, and the
    epoch length is counted in batches of this size."""
    val_batch_size: PositiveInt
    """Number of prompts per validation batch over all workers."""
    val_sample_size: CountOrAll
    """Number of validation prompts to use, a random subset determined by ``seed``, or -1 for all."""
    max_prompt_length: PositiveInt
    """Maximum prompt length in tokens, including the template."""
    max_response_length: PositiveInt
    """Maximum response length in tokens; generation stops there."""
    truncation: Literal["error", "left", "right", "middle", "filter"]
    """Treatment of overlong prompts: ``error`` ends the run before training; ``left``, ``right`` and ``middle`` drop
    the first, last and middle tokens; ``filter`` drops the prompt."""
    filter_overlong_prompts: bool
    """Drop overlong prompts; equivalent to ``truncation=filter``, and overrides ``truncation``."""
    shuffle: bool
    """Shuffle the training prompts each epoch, in an order determined by ``seed``."""
    custom_cls: CustomDatasetConfig
    sampler: SamplerConfig

    @property
    def prompts_per_batch(self) -> int:
        """Number of prompts per generation batch in training."""
        return self.train_batch_size if self.gen_batch_size is None else self.gen_batch_size

    @property
    def batch_field(self) -> str:
        """Name of the option that sets ``prompts_per_batch``."""
        return "data.train_batch_size" if self.gen_batch_size is None else "data.gen_batch_size"

    @property
    def filters(self) -> bool:
        """Whether overlong prompts are dropped."""
        return self.filter_overlong_prompts or self.truncation == "filter"

    @property
    def order(self) -> str:
        """The ``option=value`` that determines the prompt order, or an empty string if it is ``shuffle``."""
        order = f"data.train_weights={self.train_weights}" if self.train_weights else ""
        if self.sampler.class_name is not None:
            order = f"data.sampler.class_name={self.sampler.class_name}"
        return order

    def check(self) -> None:
        self._check_generated()
        weights, files = self.train_weights, len(self.train_files)
        if not weights:
            return
        field = "train_weights"
        self.require(0 < sum(weights) < math.inf, field, "needs a weight above 0, and a finite sum")
        self.require(len(weights) == files, field, f"data.train_files has {files} entries; name one weight for each")
        self.require(self.shuffle, field, "mixing draws prompts at random; set data.shuffle=true")
        mixes = self.custom_cls.path is None and self.sampler.class_path is None
        self.require(mixes, field, "with data.custom_cls or data.sampler, your class does the mixing; leave it out")

    def _check_generated(self) -> None:
        sets = {name: generated_set(name, self.generated) for name in [*self.train_files, *self.val_files]}
        for key in sorted(self.generated.keys() - {name.removeprefix(GENERATOR) for name in sets}):
            fix = f"no file names it; add {GENERATOR}{key} to data.train_files or data.val_files"
            require(False, f"generated.{key}", self.generated[key], fix)
        for name, other in product(self.val_files, self.train_files):
            one, two = sets[name], sets[other]
            if one is not None and two is not None and one.dataset == two.dataset:
                fix = f"has problems of {other}, as problem i has the seed + i; name a set with seed={two.end} or more"
                require(one.end <= two.seed or two.end <= one.seed, "val_files", name, fix)
