"""Digests of a run's inputs, such as data, tokenizer and code, to detect changes when the run resumes."""

import importlib.util
import json
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from verl.config.checks import split_source
from verl.config.errors import ConfigError
from verl.config.ppo import PPOConfig
from verl.config.rewards import summands
from verl.config.sft import SFTConfig
from verl.config.teacher import path_option
from verl.data.prompts import PromptDataset
from verl.models.hub import model_digest
from verl.rollout.environments.verl_tools import listed_tools, tool_import_path
from verl.utils.json_state import digest

HERE = Path(__file__).parents[1]

VERIFIERS = "the verifiers (verl/verifiers and verl/rewards)"
TOKENIZER, CHAT_TEMPLATE = "the tokenizer of model.path", "the chat template of model.path"
TOKENIZER_RULES = f"{TOKENIZER} (merges and normalization)"

REFUSED = ("data.train_files", TOKENIZER, CHAT_TEMPLATE, VERIFIERS, "reward_score.", "rollout.multi_turn.")
"""Prefixes of the names of inputs that must not change when a run resumes. Changes to other inputs cause a warning."""


def run_digests(
    config: PPOConfig | SFTConfig, tokenizer: PreTrainedTokenizerBase, data: Mapping[str, Iterable[Any]]
) -> dict[str, str]:
    """Return a digest for each input of a run, keyed by the option that names the input.

    The inputs are the training data, the tokenizer and its chat template, the verifiers, the files of the user's code,
    and the models that are read again when the run resumes. A file's digest does not depend on its path or format.

    Args:
        data: Option that names a data file -> records in the file.
    """
    digests = {name: digest(records) for name, records in data.items()}
    digests[TOKENIZER] = digest([tokenizer.get_vocab(), tokenizer.special_tokens_map])
    digests[TOKENIZER_RULES] = digest(_rules(tokenizer))
    digests[CHAT_TEMPLATE] = digest([tokenizer.chat_template])
    if isinstance(config, PPOConfig):
        files = sorted(file for name in ("verifiers", "rewards") for file in (HERE / name).rglob("*.py"))
        digests[VERIFIERS] = digest(file.read_text() for file in files)
        models = config.models if config.uses_reference else {k: v for k, v in config.models.items() if k != "model"}
        paths = {path_option(prefix): model.path for prefix, model in models.items()}
        # Sources that share a teacher may part.
        sources = {f"teacher.by_source[{source}]": place for source, place in config.teacher.sources.items()}
        if config.teacher.is_server:
            server = config.teacher.server
            named = sources | {"teacher.server.address": server.address or "", "teacher.server.model": server.model}
            digests |= {name: digest([value and value.rstrip("/")]) for name, value in named.items()}
        else:
            paths |= sources
        digests |= {option: model_digest(path) for option, path in paths.items()}
    return digests | {name: digest([file.read_text(errors="replace")]) for name, file in code_files(asdict(config))}


def _rules(tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    """Return the tokenizer's settings other than the vocabulary, such as merges, if they are available as JSON."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = {} if backend is None else json.loads(backend.to_str())
    model = {name: value for name, value in rules.pop("model", {}).items() if name != "vocab"}
    # Each call sets truncation and padding.
    return [model, {name: value for name, value in rules.items() if name not in ("truncation", "padding")}]


def data_by_file(dataset: PromptDataset) -> dict[str, list[Any]]:
    """Return the contents of the prompts in each data file, keyed by the option that names the file."""
    parts = ((end - size, end) for size, end in zip(dataset.sizes, accumulate(dataset.sizes), strict=True))
    return {
        f"data.train_files[{i}]": [
            [record.data_source, record.ground_truth, dict(record.extra_info), record.messages, *record.tools]
            for record in dataset.records[start:end]
        ]
        for i, (start, end) in enumerate(parts)
    }


def code_files(options: Any, name: str = "") -> Iterator[tuple[str, Path]]:
    """Yield the name of each option that refers to user code, and the file that contains the code."""
    if isinstance(options, Mapping):
        for key, value in options.items():
            yield from code_files(value, f"{name}.{key}" if name else str(key))
    elif isinstance(options, list | tuple):
        for i, value in enumerate(options):
            yield from code_files(value, f"{name}[{i}]")
    elif isinstance(options, str) and not name.startswith(("data.train_files", "data.val_files")):
        # An entry of reward_score.custom_functions names its data source first, and may be a sum of functions.
        function = split_source(options)[1] if name.startswith("reward_score.custom_functions") else options
        paths = [path for _, path in summands(function)]
        if name.endswith("agent.command"):
            paths = [part for part in shlex.split(options) if part.endswith(".py")]
        for i, path in enumerate(paths):
            where = name if len(paths) == 1 else f"{name}, function {i + 1}"
            yield from ((where, file) for file in _files_of(path, name.endswith("config_path")))
        if name.endswith("tool_config_path"):
            with suppress(ConfigError):  # reported where the tools are loaded
                for tool, _, _ in listed_tools(options, name):
                    yield from ((f"{name}, {tool}", file) for file in _files_of(tool_import_path(tool, Path(options))))


def _files_of(path: str, is_file: bool = False) -> Iterator[Path]:
    """Yield the file that contains the user code at ``path``, an import path or, if ``is_file`` is set, a file path."""
    module = path.rpartition(":")[0] or path
    if module.endswith(".py") or is_file:
        yield from [Path(module)] if Path(module).is_file() else []
    # Not an address, whose http is also a module of Python's library.
    elif ":" in path and "://" not in path and all(part.isidentifier() for part in module.split(".")):
        with suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(module)
            if spec is not None and spec.has_location and HERE not in Path(str(spec.origin)).parents:
                yield Path(str(spec.origin))


def changed(before: Mapping[str, str], now: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Return two lists of changed inputs: those that must not change (``REFUSED``), and all others."""
    names = [name for name, value in now.items() if before.get(name, value) != value]
    refused = [name for name in names if name.startswith(REFUSED)]
    return refused, [name for name in names if name not in refused]
