"""Translates the training command line, which accepts Hydra overrides and options of veRL and the paper's release.

YAML tables map all options and flags to our schema, in which each option has only one name.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import ListConfig
from omegaconf.errors import OmegaConfBaseException

from verl.cli.dialects import (
    find_verl,
    is_release,
    is_verl,
    refuse_trl_name,
    refuse_verl_name,
    require_known,
    with_verl_file,
)
from verl.cli.rules import FLAGS, RELEASE
from verl.cli.tables import CommandLine, Option
from verl.cli.values import FlagError, literal, nearest, note, override_key, unquoted
from verl.config.calculator import BASE_METRICS
from verl.config.errors import ConfigError
from verl.config.load import compose_config, fast_dtype, is_embedded
from verl.config.old_names import with_new_names
from verl.config.ppo import PPOConfig

HYDRA_FLAGS_WITH_VALUE = {
    *("--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd"),
    "--experimental-rerun",
}
HYDRA_INFO = {"all", "config", "defaults", "defaults-tree", "plugins", "searchpath"}
"""Values that may follow ``--info``."""
MULTIRUN = {"--multirun", "-m"}
HYDRA_FLAGS = {
    *HYDRA_FLAGS_WITH_VALUE,
    *MULTIRUN,
    *("--help", "-h", "--hydra-help", "--version", "--resolve", "--run", "-r", "--info", "-i"),
    *("--shell-completion", "-sc"),
}

MODEL_KEYS = ("experiment", "model", "model.path", "hydra.searchpath")
"""Options and groups that determine the model of a run."""
MAPPINGS = ("data.generated.", "data.generated=")
"""Prefixes of overrides that may add entries to a mapping."""
USER_CONFIG = {"name": ("--config-name", "-cn"), "folder": ("--config-dir", "-cd")}
"""Hydra's flags for adding the user's configurations."""

Find = Callable[[str], tuple[Option, str] | None]
"""Function that returns the table row and the mapping entry for an option's name, or None if there is no row."""


def translate(arguments: Sequence[str]) -> list[str]:
    """Return the Hydra command line for the arguments of ``train.sh``: overrides followed by Hydra's flags.

    Overrides take precedence over flags, regardless of their order. Notes are printed to stderr.

    Raises ``FlagError`` if a flag is unknown, a value is missing or unsupported, or swept models need different
    settings. Raises ``ConfigError`` if an override is invalid.
    """
    return overrides_of(read_line(arguments))


def require_one_configuration(line: CommandLine) -> None:
    """Raise ``FlagError`` if a sweep contains a flag that shows a configuration."""
    if MULTIRUN & {*line.hydra} and {"--cfg", "-c", "--info", "-i"} & {part.partition("=")[0] for part in line.hydra}:
        raise FlagError("--multirun: --cfg and --info show one configuration; leave out one of the two")


def read_line(arguments: Sequence[str]) -> CommandLine:
    """Sort the arguments, and convert Hydra options of the paper's release to command-line flags of the release.

    Raises ``FlagError`` if a flag is unknown, or a value is missing or unsupported.
    """
    line = sort_arguments(arguments, refuse_trl_name)
    if not is_release(line):
        return line
    words, others = _translated(line, lambda key: (RELEASE[key], "") if key in RELEASE else None)
    flags = dict(word[2:].split("=", 1) for word in words if word.startswith("--"))
    overrides = [*(word for word in words if not word.startswith("--")), *others]
    if "preset" not in line.options:
        note("a command of the paper's release: options that it leaves out come from preset=paper")
        overrides.insert(0, "preset=paper")
    return replace(line, flags={**line.flags, **flags}, overrides=overrides)


def overrides_of(line: CommandLine) -> list[str]:
    """Return the Hydra command line for sorted arguments (see :func:`translate`)."""
    require_one_configuration(line)
    page = "TRAINING_CONFIG.md"
    if is_verl(line.overrides):
        page = "docs/from_verl_options.md"
        line = _with_our_options(line)
    else:
        for override in line.overrides:
            refuse_verl_name(override_key(override))
    given = {f"--{name}": value for name, value in line.flags.items() if value}
    flags = {override_key(word): word for word in _apply(given, lambda name: (FLAGS[name[2:]], ""), line)}
    if line.ignored:
        note(f"no effect here: {', '.join(line.ignored)} ({page} has the reasons)")
    # Hydra rejects a group that is chosen twice, so an override replaces the flag. Hydra's parser expects adjacent
    # overrides, so its own flags are appended.
    merged = [*(o for key, o in flags.items() if key not in line.options), *line.overrides]
    if line.flags.get("compute_log_effective_rank", "").lower() == "true":
        merged = _with_log_effective_rank(merged)
    # Without ++, Hydra accepts only existing entries of a mapping.
    merged = [f"++{word}" if word.startswith(MAPPINGS) else word for word in merged]
    return [*_with_preset(merged, line.hydra), *line.hydra]


def _with_our_options(line: CommandLine) -> CommandLine:
    """Convert a veRL command to our overrides, and drop the flags that select veRL's configuration."""
    line = with_verl_file(line)
    line = replace(line, overrides=[_resolved(override, line.options) for override in line.overrides])
    translated, others = _translated(line, find_verl)
    for override in others:
        require_known(override)
    overrides = [*translated, *others]
    if not any(override_key(override) == "preset" for override in overrides):
        note("a command of veRL's: options that it leaves out have veRL's defaults, preset=verl")
        overrides.insert(0, "preset=verl")
    return replace(line, overrides=overrides)


def _resolved(text: str, values: Mapping[str, str]) -> str:
    """Return ``text`` with ``${option}`` replaced by the command's ``values``. Hydra resolves other references."""
    for _ in range(5):  # a value may refer to another option
        text = re.sub(r"\$\{(\w+(?:\.\w+)+)\}", lambda name: unquoted(values.get(name[1], name[0])), text)
    return text


def _translated(line: CommandLine, find: Find) -> tuple[list[str], list[str]]:
    """Return the translations of all overrides that have a table row, and the remaining overrides.

    If an option is set more than once, the last value takes effect, as in Hydra.
    """
    given, others = dict[str, str](), list[str]()
    for override in line.overrides:
        key, _, value = override.partition("=")
        if find(override_key(key)) is None:
            others.append(override)
        elif key.startswith("~"):
            raise FlagError(f"{key}: cannot be deleted in this command; leave it out")
        else:
            given[override_key(key)] = value
    return _apply(given, find, line), others


def _apply(given: Mapping[str, str], find: Find, line: CommandLine) -> list[str]:
    """Return the translations of options in the order of their rows, because later rows take precedence.

    Options without effect are added to ``line.ignored``.
    """
    rows = {name: row for name in given if (row := find(name)) is not None}
    words = []
    for name in sorted(rows, key=lambda name: rows[name][0].row):
        (option, entry), value = rows[name], given[name]
        try:
            words += [f"++{option.entries}.{entry}={value}"] if entry else option.translate(value, line)
        except FlagError as error:
            raise FlagError(f"{name}{' ' if name.startswith('--') else '='}{value}: {error}") from None
        if option.no_effect:
            line.ignored.append(name)
    return words


def _with_log_effective_rank(overrides: Sequence[str]) -> list[str]:
    """Return ``overrides`` with "Log Effective Rank" added to ``calculator.metric_indices``."""
    key = "calculator.metric_indices"
    keys = ("preset", "experiment", "calculator", key)
    try:
        chosen = [o for o in overrides if override_key(o) in keys]
        found = compose_config(PPOConfig, "ppo_trainer", chosen).calculator.metric_indices
    except ConfigError as error:
        if any("," in override for override in chosen):
            raise FlagError(
                f"--compute_log_effective_rank: cannot be added to a sweep over one of {', '.join(keys)}; set {key} "
                "with 4 among its indices instead"
            ) from error
        raise
    indices = found if isinstance(found, ListConfig) else [found]
    wanted = [*(index for index in indices if index is not None), BASE_METRICS.index("Log Effective Rank")]
    return [*(o for o in overrides if override_key(o) != key), f"{key}={literal(list(dict.fromkeys(wanted)))}"]


def _with_preset(overrides: list[str], hydra: Sequence[str]) -> list[str]:
    """Add ``preset=foreign`` to ``overrides`` if they select a model other than the embedded one but no preset.

    Raises ``FlagError`` if a sweep contains both the embedded model and other models.
    """
    keys = [override_key(override) for override in overrides]
    own = any(_hydra_value(hydra, flags) for flags in USER_CONFIG.values())
    if "preset" in keys or _hydra_value(hydra, ("--config-path", "-cp")) or not (own or {*keys} & {*MODEL_KEYS}):
        return overrides
    strangers: dict[str, None] = {}
    num_others = 0
    for job in product(*(_choices(override) for override in overrides if override_key(override) in MODEL_KEYS)):
        try:
            model, chosen = _model_of(job, hydra)
        except ConfigError:  # Hydra reports it later
            return overrides
        if chosen or is_embedded(model):
            num_others += 1
        else:
            strangers[model] = None
    if not strangers:
        return overrides
    which = f"model.path={', '.join(strangers)}"
    if num_others:
        raise FlagError(
            f"{which}: another job of this sweep trains the embedded model, or has a preset of its own; name the "
            "preset of all, preset=foreign or preset=embedded"
        )
    device = next((o.partition("=")[2] for o in reversed(overrides) if override_key(o) == "device"), "auto")
    note(
        f"{which} is not the embedded model: its settings are preset=foreign, with a learning rate of 1e-6 in "
        f"{fast_dtype(device)}; name another preset: small for up to 0.6B parameters on a CPU, or embedded for the "
        "embedded model's settings"
    )
    return ["preset=foreign", *overrides]


def _choices(override: str) -> list[str]:
    """Return one override for each value of a sweep, or only ``override`` itself if it is not a sweep."""
    try:
        parsed = OverridesParser.create().parse_overrides([override])[0]
        return [f"{override_key(override)}={value}" for value in parsed.sweep_string_iterator()]
    except HydraException:  # not an override, or an error that Hydra reports later
        return [override]


def _model_of(overrides: Sequence[str], hydra: Sequence[str]) -> tuple[str, bool]:
    """Return the ``model.path`` that results from the overrides, and whether the preset is not ``embedded``.

    Raises ``ConfigError`` if an override is invalid.
    """
    own = {name: _hydra_value(hydra, flags) for name, flags in USER_CONFIG.items()}
    folder = [f"hydra.searchpath=['file://{Path(own['folder']).resolve()}']"] if own["folder"] else []
    tree = compose_config(PPOConfig, own["name"] or "ppo_trainer", [*overrides, *folder], with_hydra=True)
    try:
        model = str(tree.model.path)
    except OmegaConfBaseException:  # the path refers to an unset variable
        model = "${...}"
    return model, tree.hydra.runtime.choices.get("preset") != "embedded"


def _hydra_value(hydra: Sequence[str], flags: Sequence[str]) -> str:
    """Return the value of the Hydra flag with one of these names, or an empty string if it is missing."""
    for word, after in pairwise([*hydra, ""]):
        name, has_value, value = word.partition("=")
        if name in flags:
            return value if has_value else after
    return ""


def sort_arguments(arguments: Sequence[str], refuse: Callable[[str, str], None] | None = None) -> CommandLine:
    """Sort the arguments into flags, overrides and Hydra's flags.

    ``refuse`` is called with the name and value of each override and unknown flag, and may raise a clearer error.

    Raises ``FlagError`` if a flag is unknown or its value is missing.
    """
    line = CommandLine({}, [], [])
    rest = with_new_names(arguments)
    while rest:
        argument = rest.pop(0)
        name, has_value, value = argument.partition("=")
        if name in HYDRA_FLAGS:
            line.hydra.append(argument)
            if not has_value and name in HYDRA_FLAGS_WITH_VALUE:
                line.hydra.append(_next_value(name, rest))
            elif not has_value and name in ("--info", "-i") and rest and rest[0] in HYDRA_INFO:
                line.hydra.append(rest.pop(0))
        elif not argument.startswith("--"):
            if refuse is not None:
                refuse(override_key(argument), value)
            if argument.strip():  # a script line that ends in a backslash and a space yields a blank argument
                line.overrides.append(argument)
        elif name.removeprefix("--") in FLAGS:
            text = value if has_value else _next_value(name, rest)
            line.flags[name.removeprefix("--")] = "" if text.strip() in ("", '""', "''") else text.strip()
        else:
            if refuse is not None:
                refuse(name.removeprefix("--"), value or ("" if not rest or rest[0].startswith("--") else rest[0]))
            flags = [] if refuse is None else [f"--{flag}" for flag in FLAGS]  # eval.sh has no flags of its own
            otherwise = "; TRAINING_CONFIG.md lists them" if flags else "; set options as in model.path=VALUE"
            hint = nearest(name, [*flags, *HYDRA_FLAGS]) or otherwise
            if name.startswith("--config"):
                hint = "; a file of options is named by --config-dir=FOLDER --config-name=NAME"
            if "." in name:
                hint = f"; options are set without dashes: {name.lstrip('-')}=VALUE"
            raise FlagError(f"{name}: unknown flag{hint}")
    return line


def _next_value(name: str, rest: list[str]) -> str:
    if not rest or rest[0].startswith("--") or rest[0] in HYDRA_FLAGS:
        raise FlagError(f"{name}: needs a value after it")
    return rest.pop(0)
