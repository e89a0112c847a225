"""The command line of training: flags of the paper's release, Hydra overrides, and Hydra's own flags.

A flag sets one option. What the release's script set without a flag is left to the config, with one exception:
``--model_name`` starts from the paper's preset. The release's spellings end here; the schema holds each option once.
"""

import os
import re
from collections.abc import Sequence
from itertools import pairwise, product
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig
from omegaconf.errors import OmegaConfBaseException

from verl.cli.tables import CommandLine, Option, load_table, plain
from verl.cli.values import FlagError, literal, nearest, note, override_key, quoted
from verl.cli.verl_options import translate_verl
from verl.config.calculator import BASE_METRICS
from verl.config.errors import ConfigError
from verl.config.load import CONFIG_DIR, compose_config, fast_dtype, is_embedded
from verl.config.ppo import PPOConfig

HYDRA_FLAGS_WITH_VALUE = {
    *("--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd"),
    "--experimental-rerun",
}
HYDRA_INFO = {"all", "config", "defaults", "defaults-tree", "plugins", "searchpath"}
"""Optional values of ``--info``."""
MULTIRUN = {"--multirun", "-m"}
HYDRA_FLAGS = {
    *HYDRA_FLAGS_WITH_VALUE,
    *MULTIRUN,
    *("--help", "-h", "--hydra-help", "--version", "--resolve", "--run", "-r", "--info", "-i"),
    *("--shell-completion", "-sc"),
}

MODEL_KEYS = ("experiment", "model", "model.path", "hydra.searchpath")
"""What decides which model a run trains."""
OWN_CONFIG = {"name": ("--config-name", "-cn"), "folder": ("--config-dir", "-cd")}
"""Hydra's flags for configurations of the user's beside ours."""


# Flags whose meaning depends on others: what ``by`` in release_flags.yaml names.


def motivation_mode(flag: Option, value: str, line: CommandLine) -> list[str]:
    """With ``--val_only`` it is an analysis, which :mod:`verl.cli.release_analysis` recognises before."""
    if value.lower() != "disable":
        note(
            f"--motivation_mode {value}: trains, with validations as usual; once it has checkpoints, `python -m "
            "verl.trainer.main_analysis model.path=RUN` analyses them, and `--val_only True` analyses a model without "
            "training it"
        )
    return []


def val_only(flag: Option, value: str, line: CommandLine) -> list[str]:
    """Without a mode the release analyses, in its default ``allin``; here ``trainer.val_only`` validates."""
    if value.lower() == "true" and "motivation_mode" not in line.flags:
        note("--val_only: validates; for the release's spreadsheets add --motivation_mode allin")
    return flag.assign(value)


def dataset_name(flag: Option, value: str, line: CommandLine) -> list[str]:
    folder = f"{os.environ.get('HDFS_DATA_PATH') or 'data'}/{value}"
    files = {"data.train_files": "train.parquet", "data.val_files": "test.parquet"}
    named = [f"{option}=[{quoted(f'{folder}/{name}')}]" for option, name in files.items()]
    if not value.startswith("simplelr_") or "data" in line.options:
        return named
    note("--dataset_name: prompts of SimpleRL-Zoo's files are read as they are, as configs/data/simplerl.yaml has it")
    return ["data=simplerl", *named]


def model_name(flag: Option, value: str, line: CommandLine) -> list[str]:
    root = os.environ.get("HDFS_MODEL_PATH")
    path = f"{root}/{value}" if root and Path(root, value).is_dir() else value
    overrides = [f"model.path={quoted(path)}"]
    if "preset" not in line.options:
        # The embedded task's learning rate would ruin a pretrained model; the release's script uses another.
        note(
            "--model_name: other options come from configs/preset/paper.yaml; preset=embedded uses the embedded task's"
        )
        overrides.insert(0, "preset=paper")
    return overrides


def total_epochs(flag: Option, value: str, line: CommandLine) -> list[str]:
    limit = [] if line.flags.get("total_steps") else ["trainer.total_training_steps=0"]
    return [*flag.assign(value), *limit]


def total_steps(flag: Option, value: str, line: CommandLine) -> list[str]:
    """The release's counter starts at 1 and training ends as soon as it reaches the value: one update fewer."""
    if not re.fullmatch(r"\d+(,\d+)*", value):
        raise FlagError("must be a whole number")
    return flag.assign(",".join(str(max(1, int(total) - 1)) for total in value.split(",")))


def adv_estimator(flag: Option, value: str, line: CommandLine) -> list[str]:
    known = sorted(path.stem for path in (CONFIG_DIR / "algorithm").glob("*.yaml"))
    for name in value.split(","):
        if name not in known:
            raise FlagError(f"must be one of {', '.join(known)}{nearest(name, known)}")
    return [f"algorithm={value}"]


def diff_calculator_method(flag: Option, value: str, line: CommandLine) -> list[str]:
    if value == "batched":
        return ["calculator.prefix_rule=at_stride_and_whole", "calculator.max_seq_len_from=start"]
    if "batched" in value.split(","):
        raise FlagError("batched sets other options and cannot be swept; sweep over calculator.prefix_rule instead")
    return flag.assign(value)


def metric_indices_add(flag: Option, value: str, line: CommandLine) -> list[str]:
    if "response_entropy" in re.findall(r"\w+", value):
        raise FlagError("response_entropy is the same number as avg_response_entropy; name that")
    return flag.assign(value)


def critic_model_path(flag: Option, value: str, line: CommandLine) -> list[str]:
    estimator = line.flags.get("adv_estimator") or "grpo"
    if line.options.keys() & {"algorithm", "algorithm.adv_estimator", "experiment"}:
        estimator = "gae"  # or another, which does not load the critic whatever its path
    if "gae" not in estimator.split(","):
        note(f"--critic_model_path is ignored: {estimator} has no critic; --adv_estimator gae has one")
        return []
    return flag.assign(value)


def exp_name(flag: Option, value: str, line: CommandLine) -> list[str]:
    name = f"{value}_{line.flags['suffix']}" if line.flags.get("suffix") else value
    return [f"trainer.experiment_name={quoted(name)}"]


def suffix(flag: Option, value: str, line: CommandLine) -> list[str]:
    if line.flags.get("exp_name"):
        return []  # exp_name appends it
    return exp_name(flag, _composed(line.overrides, "experiment").trainer.experiment_name, line)


FLAGS = load_table("release_flags.yaml", globals(), "scalar")
"""Every flag of the release: name without dashes -> what becomes of it."""


def _composed(overrides: Sequence[str], *keys: str) -> DictConfig:
    """The config as far as overrides of ``keys`` decide it."""
    return compose_config(PPOConfig, "ppo_trainer", [o for o in overrides if override_key(o) in keys])


def _with_log_effective_rank(overrides: Sequence[str]) -> list[str]:
    """``overrides`` with "Log Effective Rank" among ``calculator.metric_indices``."""
    key = "calculator.metric_indices"
    keys = ("preset", "experiment", "calculator", key)
    try:
        found = _composed(overrides, *keys).calculator.metric_indices
    except ConfigError as error:
        if any("," in override for override in overrides if override_key(override) in keys):
            raise FlagError(
                f"--compute_log_effective_rank: cannot be added to a sweep over one of {', '.join(keys)}; set {key} "
                "with 4 among its indices instead"
            ) from error
        raise
    indices = found if isinstance(found, ListConfig) else [found]
    wanted = [*(index for index in indices if index is not None), BASE_METRICS.index("Log Effective Rank")]
    return [*(o for o in overrides if override_key(o) != key), f"{key}={literal(list(dict.fromkeys(wanted)))}"]


def _with_preset(overrides: list[str], hydra: Sequence[str]) -> list[str]:
    """``overrides`` with the preset for a model that is not the embedded one, where no other is named.

    Raises:
        FlagError: a sweep over the embedded model and others.
    """
    keys = [override_key(override) for override in overrides]
    own = any(_hydra_value(hydra, flags) for flags in OWN_CONFIG.values())
    if "preset" in keys or _hydra_value(hydra, ("--config-path", "-cp")) or not (own or {*keys} & {*MODEL_KEYS}):
        return overrides
    strangers: dict[str, None] = {}
    num_others = 0
    for job in product(*(_choices(override) for override in overrides if override_key(override) in MODEL_KEYS)):
        try:
            model, chosen = _model_of(job, hydra)
        except ConfigError:  # Hydra's to explain
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
    """The overrides that a sweep makes of one; itself where it is no sweep."""
    try:
        parsed = OverridesParser.create().parse_overrides([override])[0]
        return [f"{override_key(override)}={value}" for value in parsed.sweep_string_iterator()]
    except HydraException:  # of another kind, or Hydra's to explain
        return [override]


def _model_of(overrides: Sequence[str], hydra: Sequence[str]) -> tuple[str, bool]:
    """``model.path``, and whether a file of the user's chooses a preset, as far as these overrides decide it.

    Raises:
        ConfigError: an override that does not fit.
    """
    own = {name: _hydra_value(hydra, flags) for name, flags in OWN_CONFIG.items()}
    folder = [f"hydra.searchpath=['file://{Path(own['folder']).resolve()}']"] if own["folder"] else []
    tree = compose_config(PPOConfig, own["name"] or "ppo_trainer", [*overrides, *folder], with_hydra=True)
    try:
        model = str(tree.model.path)
    except OmegaConfBaseException:  # of a variable that is not set
        model = "${...}"
    return model, tree.hydra.runtime.choices.get("preset") != "embedded"


def _hydra_value(hydra: Sequence[str], flags: Sequence[str]) -> str:
    """The value of one of Hydra's own flags, which has these names; empty without it."""
    for word, after in pairwise([*hydra, ""]):
        name, has_value, value = word.partition("=")
        if name in flags:
            return value if has_value else after
    return ""


def translate(arguments: Sequence[str]) -> list[str]:
    """The Hydra command line for the arguments of ``train.sh``: overrides, then Hydra's own flags.

    Overrides win over flags, whatever the order of the arguments. Notes go to stderr.

    Raises:
        FlagError: an unknown flag, or a missing or unsupported value; a sweep over models whose settings differ.
        ConfigError: an override that does not fit.
    """
    line = translate_verl(sort_arguments(arguments))
    hydra = {argument.partition("=")[0] for argument in line.hydra}
    if MULTIRUN & hydra and {"--cfg", "-c", "--info", "-i"} & hydra:
        raise FlagError("--multirun: --cfg and --info show one configuration; leave out one of the two")
    overrides: dict[str, str] = {}
    for name, value in line.flags.items():
        flag = FLAGS[name]
        try:
            translated = flag.translate(value, line) if value else []
        except FlagError as error:
            raise FlagError(f"--{name} {value}: {error}") from None
        if flag.accepted and value and value.lower() != "false":
            note(f"--{name} {value} has no effect: {plain(flag.accepted)}")
        overrides |= {override_key(override): override for override in translated}
    # Hydra refuses a group that is chosen twice, so an override replaces the flag. Hydra's parser expects all overrides
    # next to each other, so its own flags come last.
    merged = [*(o for key, o in overrides.items() if key not in line.options), *line.overrides]
    if line.flags.get("compute_log_effective_rank", "").lower() == "true":
        merged = _with_log_effective_rank(merged)
    return [*_with_preset(merged, line.hydra), *line.hydra]


def sort_arguments(arguments: Sequence[str]) -> CommandLine:
    """Separate flags, overrides and Hydra's flags.

    Raises:
        FlagError: an unknown flag or a missing value.
    """
    line = CommandLine({}, [], [])
    rest = list(arguments)
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
            if argument.strip():  # a line of a script that ends in a backslash and a blank leaves a word of blanks
                line.overrides.append(argument)
        elif name.removeprefix("--") in FLAGS:
            text = value if has_value else _next_value(name, rest)
            line.flags[name.removeprefix("--")] = "" if text.strip() in ("", '""', "''") else text.strip()
        else:
            hint = nearest(name, [*(f"--{flag}" for flag in FLAGS), *HYDRA_FLAGS]) or "; TRAINING_CONFIG.md lists them"
            if "." in name:
                hint = f"; options are set without dashes: {name.lstrip('-')}=VALUE"
            raise FlagError(f"{name}: unknown flag{hint}")
    return line


def _next_value(name: str, rest: list[str]) -> str:
    if not rest or rest[0].startswith("--") or rest[0] in HYDRA_FLAGS:
        raise FlagError(f"{name}: needs a value after it")
    return rest.pop(0)
