"""The Hydra command of the paper's release, which its script runs: the release's options become its flags, or ours.

A command with an option that only the release has is the release's as a whole: what it leaves out comes from
``preset=paper``, as with its flags. Its options that veRL has too are left to :mod:`verl.cli.verl_options`.
"""

from collections.abc import Sequence
from pathlib import PurePath

from verl.cli.tables import CommandLine, Option, load_table, plain
from verl.cli.values import FlagError, note, override_key, unquoted
from verl.cli.verl_functions import ACTOR, ROLLOUT, plain_name

PRESET = "preset=paper"

LORA = {"rank": ("lora_r", "8"), "alpha": ("lora_alpha", "32"), "dropout": ("lora_dropout", "0.05")}
"""Our option of ``model.lora`` -> the release's, and its default there."""


def use_lora(option: Option, value: str, line: CommandLine) -> list[str]:
    if unquoted(value).lower() != "true":
        return []
    numbers = {ours: line.text(f"{ACTOR}.{theirs}", default) for ours, (theirs, default) in LORA.items()}
    modules = line.options.get(f"{ACTOR}.lora_target_modules", "[q_proj,v_proj]")
    return [
        *(f"model.lora.{ours}={number}" for ours, number in numbers.items()),
        f"model.lora.target_modules={modules}",
    ]


def train_files(option: Option, value: str, line: CommandLine) -> list[str]:
    named = option.assign(value)
    if not PurePath(unquoted(value)).parent.name.startswith("simplelr_") or "data" in line.options:
        return named
    note("data.train_files: prompts of SimpleRL-Zoo's files are read as they are, as configs/data/simplerl.yaml has it")
    return ["data=simplerl", *named]


def except_save(option: Option, value: str, line: CommandLine) -> list[str]:
    return option.assign(value.replace("\\", "").replace("'", "").replace('"', ""))  # the script writes \'10,20\'


OPTIONS = load_table("release_options.yaml", globals() | {"plain_name": plain_name}, "unquoted")
"""The release's Hydra option -> what becomes of it."""
MARKS = frozenset(name for name, option in OPTIONS.items() if option.section == "marks")


def release_words(arguments: Sequence[str]) -> list[str]:
    """The arguments of ``train.sh`` with the release's flags in place of its Hydra options; unchanged without any.

    Notes go to stderr, one line for each reason.

    Raises:
        FlagError: an option has a value that is not supported.
    """
    line = CommandLine({}, [word for word in arguments if not word.startswith("-") and "=" in word], [])
    if not MARKS & line.options.keys() and line.text(f"{ROLLOUT}.name") != "hidden_vllm":
        return list(arguments)
    words: list[str] = []
    notes: dict[str, list[str]] = {}
    for word in arguments:
        key, _, value = word.partition("=")
        option = OPTIONS.get(override_key(word)) if word in line.overrides else None
        if option is None:
            words.append(word)
            continue
        try:
            words += option.translate(value, line)
        except FlagError as error:
            raise FlagError(f"{key}={value}: {error}") from None
        if option.accepted:
            notes.setdefault(option.accepted, []).append(option.name)
    for reason, keys in notes.items():
        note(f"{', '.join(dict.fromkeys(keys))}: no effect: {plain(reason)}")
    if "preset" not in line.options:
        note(f"a command of the paper's release: options that it leaves out come from {PRESET}")
        words.insert(0, PRESET)
    return words
