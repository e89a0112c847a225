"""Prompts: their files, templates and batches."""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from verl.config.checks import NAMES_ONE, CountOrAll, Group, NotNegativeFloat, PositiveInt, require

FILE_SUFFIXES = (".parquet", ".jsonl", ".json")
"""Kinds of data files that are read."""

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(@[\w./-]+)?")
_HUB_CONFIG = re.compile(r"[\w.-]*")

CHAT_ARGUMENTS = {
    *("conversation", "messages", "chat_template", "tokenize", "tokenizer_kwargs", "return_dict", "return_tensors"),
    *("return_assistant_tokens_mask", "add_generation_prompt", "continue_final_message"),
    *("padding", "truncation", "max_length"),
}
"""Arguments of ``apply_chat_template`` that are fixed: others would cut or pad prompts."""


class HubSet(NamedTuple):
    """One split of a data set on the Hugging Face hub."""

    hub_id: str
    config: str
    """Empty: the only or the default one."""
    split: str
    revision: str = ""
    """Branch, tag or commit; empty: ``main``."""


def hub_set(name: str) -> HubSet | None:
    """Return the set that ``owner/name``, ``owner/name:split`` or ``owner/name:config:split`` names; None for a file.

    A branch follows the name, ``owner/name@branch``. Without a split it is ``train``. A name below ``data/`` is a file
    even if that is missing.
    """
    hub_id, *rest = name.split(":", 2)
    config, split = (["", "train"], ["", *rest], rest)[len(rest)]
    is_file = hub_id.endswith(FILE_SUFFIXES) or Path(name).is_file() or hub_id.startswith("data/")
    if is_file or not (_HUB_ID.fullmatch(hub_id) and _HUB_CONFIG.fullmatch(config)):
        return None
    hub_id, _, revision = hub_id.partition("@")
    return HubSet(hub_id, config, split, revision)


def _check_chat_arguments(field: str, arguments: dict[str, Any]) -> None:
    taken = sorted(CHAT_ARGUMENTS & arguments.keys())
    require(not taken, field, arguments, f"{', '.join(taken)} cannot be set here; leave it out")


ChatArguments = Annotated[dict[str, Any], _check_chat_arguments]


@dataclass(frozen=True)
class CustomDatasetConfig(Group):
    """A class of your own that yields the records of prompts; docs/data.md has its protocol."""

    path: str | None
    """Its file, ``my_prompts.py``, or its module, ``my_package.prompts``. Null: the files hold the prompts."""
    name: str | None
    """The class in it."""

    def check(self) -> None:
        both = (self.path is None) == (self.name is None)
        self.require(both, "name", f"path={self.path!r}: set both path and name, or neither")


@dataclass(frozen=True)
class SamplerConfig(Group):
    """A custom class that chooses the order of training prompts, such as a curriculum; docs/data.md has its protocol.

    With ``async_training.max_staleness`` above 0 it learns of a step after the prompts of later steps are drawn."""

    class_path: str | None
    """Its file or its module. Null: a random order, or with ``data.shuffle=false`` that of the files."""
    class_name: str | None
    """The class in it."""

    def check(self) -> None:
        both = (self.class_path is None) == (self.class_name is None)
        fix = f"class_path={self.class_path!r}: set both class_path and class_name, or neither"
        self.require(both, "class_name", fix)


@dataclass(frozen=True)
class DataConfig(Group):
    """Prompts and their batches."""

    train_files: Annotated[list[str], NAMES_ONE]
    """Training prompts in veRL's record layout: ``.parquet``, ``.jsonl`` or ``.json`` files, or sets of the Hugging
    Face hub as ``owner/name``, ``owner/name:split`` or ``owner/name:config:split``."""
    val_files: list[str]
    """Validation prompts, named in the same way; without any, nothing is validated."""
    train_weights: list[NotNegativeFloat]
    """Share of each of ``train_files`` in an epoch, in any unit, at least 0. An epoch has as many prompts as all files
    together; from a file that gets more than it has, prompts are drawn again. Empty: every prompt once per epoch."""
    train_max_samples: CountOrAll
    """Train on this many prompts of all files together, drawn once with ``seed``, or with ``shuffle=false`` the first;
    -1: on all."""
    prompt_key: str
    """Column of the prompt: a chat, ``[{"role": ..., "content": ...}]``, or text, which is a message of the user."""
    reward_fn_key: str
    """Column that names the verifier of a row."""
    template: str
    """How a prompt is written for the model. ``chat``: by the tokenizer's chat template, with all messages. ``raw``:
    the unchanged text. Or another key of ``verl.data.templates.TEMPLATES``: the text is the question. For all but
    ``chat`` a prompt is text or a single user message. The template's stop tokens and strings end responses."""
    apply_chat_template_kwargs: ChatArguments
    """Arguments for the tokenizer's chat template: ``+data.apply_chat_template_kwargs.enable_thinking=false``."""
    train_batch_size: PositiveInt
    """Prompts per training step, over all workers."""
    gen_batch_size: PositiveInt | None
    """Prompts per generation batch of dynamic sampling (``algorithm.filter_groups``), over all workers; null:
    ``train_batch_size``. More of them find a full batch in fewer rounds. Prompts that are not needed are dropped, and
    an epoch has as many steps as batches of this size."""
    val_batch_size: PositiveInt
    """Prompts per validation batch, over all workers."""
    val_sample_size: CountOrAll
    """Validate on this many prompts, drawn once with ``seed``; -1: on all."""
    max_prompt_length: PositiveInt
    """Longest prompt in tokens, template included."""
    max_response_length: PositiveInt
    """Longest response in tokens; generation stops there."""
    truncation: Literal["error", "left", "right", "middle", "filter"]
    """Treatment of a prompt that is too long: ``error`` ends the run before training, ``left`` drops the first tokens,
    ``right`` the last, ``middle`` tokens in the middle, and ``filter`` the prompt."""
    filter_overlong_prompts: bool
    """Leave out prompts that are too long: the same as ``truncation=filter``, which it overrides."""
    shuffle: bool
    """Read the training prompts in a new random order each epoch, fixed by ``seed``."""
    custom_cls: CustomDatasetConfig
    sampler: SamplerConfig

    @property
    def prompts_per_batch(self) -> int:
        """Prompts that are read and sampled together in training."""
        return self.train_batch_size if self.gen_batch_size is None else self.gen_batch_size

    @property
    def batch_field(self) -> str:
        """The option that sets ``prompts_per_batch``."""
        return "data.train_batch_size" if self.gen_batch_size is None else "data.gen_batch_size"

    @property
    def filters(self) -> bool:
        """Whether prompts that are too long are left out."""
        return self.filter_overlong_prompts or self.truncation == "filter"

    @property
    def order(self) -> str:
        """The option other than ``shuffle`` that decides the order of training prompts, with its value; or empty."""
        order = f"data.train_weights={self.train_weights}" if self.train_weights else ""
        if self.sampler.class_name is not None:
            order = f"data.sampler.class_name={self.sampler.class_name}"
        return order

    def check(self) -> None:
        weights, files = self.train_weights, len(self.train_files)
        if not weights:
            return
        field = "train_weights"
        self.require(0 < sum(weights) < math.inf, field, "needs a weight above 0, and a finite sum")
        fix = f"data.train_files has {files} entries; name one weight for each"
        self.require(len(weights) == files, field, fix)
        self.require(self.shuffle, field, "mixing draws prompts at random; set data.shuffle=true")
        mixes = self.custom_cls.path is None and self.sampler.class_path is None
        fix = "with data.custom_cls or data.sampler, your class does the mixing; leave it out"
        self.require(mixes, field, fix)
