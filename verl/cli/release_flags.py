"""The command line of training: flags of the paper's release, Hydra overrides, and Hydra's own flags.

A flag sets one option. What the release's script set without a flag is left to the config, with one exception:
``--model_name`` starts from the paper's preset. The release's spellings end here; the schema holds each option once.
"""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from omegaconf import DictConfig, ListConfig

from verl.cli.values import FlagError, listed, literal, nearest, note, override_key, quoted, scalar
from verl.cli.verl_options import translate_overrides
from verl.config.calculator import BASE_METRICS
from verl.config.errors import ConfigError
from verl.config.load import CONFIG_DIR, compose_config
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

RETIRED_OPTIONS = {"trainer.remove_previous_ckpt", "calculator.svd_niter", "calculator.compute_log_effective_rank"}
"""Former options of the schema; as overrides they mean what the flags of the same names mean."""


@dataclass(frozen=True)
class CommandLine:
    """The arguments of ``train.sh``, sorted."""

    flags: dict[str, str]
    """The release's flags with their values; a flag with an empty value counts as not given."""
    overrides: list[str]
    """Hydra overrides."""
    hydra: list[str]
    """Hydra's own flags, with their values."""

    @property
    def keys(self) -> set[str]:
        """What the overrides set: an option such as ``trainer.test_freq``, or a group."""
        return {override_key(override) for override in self.overrides}


@dataclass(frozen=True)
class Flag:
    """One flag of the release."""

    becomes: str
    """The options that it sets, in Markdown, for TRAINING_CONFIG.md."""
    translate: Callable[[str, CommandLine], list[str]]
    """Turns its value, which is not empty, into overrides."""
    note: str = ""
    """A note for the user, printed unless the value is false."""


def sets(*options: str, convert: Callable[[str], str] = scalar) -> Flag:
    """A flag whose value ``options`` are set to."""

    def translate(value: str, line: CommandLine) -> list[str]:
        return [f"{option}={convert(value)}" for option in options]

    return Flag(", ".join(f"`{option}`" for option in options), translate)


def plain(markdown: str) -> str:
    """Without the marks of code."""
    return markdown.replace("`", "")


def switch(becomes: str, overrides: Sequence[str]) -> Flag:
    """A flag that sets ``overrides`` if it is true."""

    def translate(value: str, line: CommandLine) -> list[str]:
        if value.lower() not in ("true", "false"):
            raise FlagError("must be true or false")
        return list(overrides) if value.lower() == "true" else []

    return Flag(becomes, translate)


def without_effect(reason: str) -> Flag:
    """A flag that is accepted but has no effect."""
    return Flag(f"no effect: {reason}", lambda value, line: [], f"has no effect: {plain(reason)}")


def _motivation_mode(value: str, line: CommandLine) -> list[str]:
    """With ``--val_only`` it is an analysis, which :mod:`verl.cli.release_analysis` recognises before."""
    if value.lower() != "disable":
        note(f"--motivation_mode {value}: {plain(TRAINS)}")
    return []


def _val_only(value: str, line: CommandLine) -> list[str]:
    """Without a mode the release analyses, in its default ``allin``; here ``trainer.val_only`` validates."""
    if value.lower() == "true" and "motivation_mode" not in line.flags:
        note("--val_only: validates; for the release's spreadsheets add --motivation_mode allin")
    return [f"trainer.val_only={scalar(value)}"]


def _dataset(value: str, line: CommandLine) -> list[str]:
    folder = f"{os.environ.get('HDFS_DATA_PATH') or 'data'}/{value}"
    files = {"data.train_files": "train.parquet", "data.val_files": "test.parquet"}
    named = [f"{option}=[{quoted(f'{folder}/{name}')}]" for option, name in files.items()]
    if not value.startswith("simplelr_") or "data" in line.keys:
        return named
    note("--dataset_name: prompts of SimpleRL-Zoo's files are read as they are, as configs/data/simplerl.yaml has it")
    return ["data=simplerl", *named]


def _model(value: str, line: CommandLine) -> list[str]:
    root = os.environ.get("HDFS_MODEL_PATH")
    path = f"{root}/{value}" if root and Path(root, value).is_dir() else value
    overrides = [f"model.path={quoted(path)}"]
    if "preset" not in line.keys:
        # The embedded task's learning rate would ruin a pretrained model; the release's script uses another.
        note(
            "--model_name: other options come from configs/preset/paper.yaml; preset=embedded uses the embedded task's"
        )
        overrides.insert(0, "preset=paper")
    return overrides


def _epochs(value: str, line: CommandLine) -> list[str]:
    limit = [] if line.flags.get("total_steps") else ["trainer.total_training_steps=0"]
    return [f"trainer.total_epochs={scalar(value)}", *limit]


def _total_steps(value: str, line: CommandLine) -> list[str]:
    """The release's counter starts at 1 and training ends as soon as it reaches the value: one update fewer."""
    if not re.fullmatch(r"\d+(,\d+)*", value):
        raise FlagError("must be a whole number")
    return [f"trainer.total_training_steps={','.join(str(max(1, int(total) - 1)) for total in value.split(','))}"]


def _estimator(value: str, line: CommandLine) -> list[str]:
    known = sorted(path.stem for path in (CONFIG_DIR / "algorithm").glob("*.yaml"))
    for name in value.split(","):
        if name not in known:
            raise FlagError(f"must be one of {', '.join(known)}{nearest(name, known)}")
    return [f"algorithm={value}"]


def _diff_method(value: str, line: CommandLine) -> list[str]:
    if value != "batched":
        if "batched" in value.split(","):
            raise FlagError("batched sets other options and cannot be swept; sweep over calculator.prefix_rule instead")
        return [f"calculator.diff_calculator_method={scalar(value)}"]
    return ["calculator.prefix_rule=at_stride_and_whole", "calculator.max_seq_len_from=start"]


def _token_metrics(value: str, line: CommandLine) -> list[str]:
    if "response_entropy" in re.findall(r"\w+", value):
        raise FlagError("response_entropy is the same number as avg_response_entropy; name that")
    return [f"calculator.metric_indices_add={listed(value)}"]


def _critic(value: str, line: CommandLine) -> list[str]:
    estimator = line.flags.get("adv_estimator") or "grpo"
    if {"algorithm", "algorithm.adv_estimator", "experiment"} & line.keys:
        estimator = "gae"  # or another, which does not load the critic whatever its path
    if "gae" not in estimator.split(","):
        note(f"--critic_model_path is ignored: {estimator} has no critic; --adv_estimator gae has one")
        return []
    return [f"critic.model.path={quoted(value)}"]


def _experiment_name(value: str, line: CommandLine) -> list[str]:
    suffix = line.flags.get("suffix")
    return [f"trainer.experiment_name={quoted(f'{value}_{suffix}' if suffix else value)}"]


def _suffix(value: str, line: CommandLine) -> list[str]:
    if line.flags.get("exp_name"):
        return []  # _experiment_name appends it
    return _experiment_name(_composed(line.overrides, "experiment").trainer.experiment_name, line)


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


CAPTURED = "the hidden states of all response tokens are always measured, see `calculator.enable`"
TRAINS = (
    "trains, with validations as usual; once it has checkpoints, `python -m verl.trainer.main_analysis model.path=RUN` "
    "analyses them, and `--val_only True` analyses a model without training it"
)
NO_PLOTS = (
    "the analysis measures every metric; `analysis.response_pairs` and `analysis.prompt_pairs` choose the scatters"
)
OF_ANALYSIS = "with `--motivation_mode`: `analysis.{}`"

FLAGS = {
    "model_name": Flag(
        "`model.path`: `$HDFS_MODEL_PATH/NAME` if that folder exists, else `NAME`, a folder or hub id; also "
        "`preset=paper`, unless a `preset=` is given",
        _model,
    ),
    "dataset_name": Flag(
        "`data.train_files`, `data.val_files`: `train.parquet` and `test.parquet` in `$HDFS_DATA_PATH/NAME`, or in "
        "`data/NAME` if that variable is not set; also `data=simplerl` for `simplelr_...`, the files of SimpleRL-Zoo, "
        "unless a `data=` is given",
        _dataset,
    ),
    "train_batch_size": sets("data.train_batch_size"),
    "val_batch_size": sets("data.val_batch_size"),
    "max_prompt_length": sets("data.max_prompt_length"),
    "max_response_length": sets("data.max_response_length"),
    "val_sample_size": sets("data.val_sample_size"),
    "learning_rate": sets("actor.optim.lr"),
    "ppo_mini_batch_size": sets("actor.ppo_mini_batch_size"),
    "ppo_micro_batch_size": sets("actor.micro_batch_size_per_gpu"),
    "log_prob_micro_batch_size": sets("actor.log_prob_micro_batch_size_per_gpu"),
    "clip_ratio": sets("actor.clip_ratio_low", "actor.clip_ratio_high"),
    "entropy_coefficient": sets("actor.entropy_coeff"),
    "kl_loss_coef": sets("actor.kl_loss_coef"),
    "kl_loss_type": sets("actor.kl_loss_type"),
    "rollout_n": sets("rollout.n"),
    "temperature": sets("rollout.temperature"),
    "rollout_gpu_memory_util": sets("rollout.gpu_memory_utilization"),
    "rollout_tp": sets("rollout.tensor_parallel_size"),
    "micro_rollout_batch_size": without_effect("vLLM schedules by itself, see `rollout.max_num_seqs`"),
    "adv_estimator": Flag("`algorithm`, a file of `configs/algorithm/`", _estimator),
    "kl_coef": sets("algorithm.kl_ctrl.kl_coef"),
    "critic_model_path": Flag("`critic.model.path`; ignored, with a note, if there is no critic", _critic),
    "enable_calculator": sets("calculator.enable"),
    "metric_indices": sets("calculator.metric_indices", convert=listed),
    "metric_indices_add": Flag("`calculator.metric_indices_add`", _token_metrics),
    "diff_stride": sets("calculator.diff_stride"),
    "compute_log_effective_rank": switch("adds index 4 to `calculator.metric_indices`", []),
    "zeroth_order_svd_method": sets("calculator.zeroth_order_svd_method"),
    "diff_svd_method": sets("calculator.diff_svd_method"),
    "svd_rank": sets("calculator.svd_rank"),
    "svd_niter": without_effect("`lowrank` keeps the exact largest singular values, which need no iterations"),
    "diff_calculator_method": Flag(
        "`calculator.diff_calculator_method`; `batched`, of the later release, is "
        "`calculator.prefix_rule=at_stride_and_whole calculator.max_seq_len_from=start` instead",
        _diff_method,
    ),
    "compute_global_metrics": sets("calculator.compute_global_metrics"),
    "compute_cumulative_global_metrics": sets("calculator.compute_cumulative_global_metrics"),
    "global_diff_stride_train": sets("calculator.global_diff_stride_train"),
    "global_diff_stride_val": sets("calculator.global_diff_stride_val"),
    "return_hidden_states": without_effect(CAPTURED),
    "return_decode": without_effect(CAPTURED),
    "return_prefill": without_effect("the hidden states of prompts are not measured"),
    "add_reward": sets("reward_manager.add_reward"),
    "add_adv": sets("reward_manager.add_adv"),
    "reward_indicator_names": sets("reward_manager.indicator_names", convert=listed),
    "reward_weights": sets("reward_manager.w_explore", convert=listed),
    "reward_weights_exploit": sets("reward_manager.w_exploit", convert=listed),
    "reward_ema_alpha": sets("reward_manager.ema_alpha"),
    "hypothesis_type": sets("reward_manager.hypothesis_type"),
    "modulation_gain": sets("reward_manager.gain"),
    "adv_shaping_kappa": sets("reward_manager.kappa"),
    "aux_reward_global_weight": sets("reward_manager.aux_reward_global_weight"),
    "aux_fix": sets("reward_manager.aux_fix"),
    "total_epochs": Flag(
        "`trainer.total_epochs`; also `trainer.total_training_steps=0`, no limit, unless `--total_steps` is given",
        _epochs,
    ),
    "total_steps": Flag("`trainer.total_training_steps`, less 1, as the release ends one update early", _total_steps),
    "save_freq": sets("trainer.save_freq"),
    "except_save": sets("trainer.except_save", convert=listed),
    "remove_previous_ckpt": switch("`trainer.max_ckpt_to_keep=1`", ["trainer.max_ckpt_to_keep=1"]),
    "test_freq": sets("trainer.test_freq"),
    "val_before_train": sets("trainer.val_before_train"),
    "val_only": Flag("`trainer.val_only`", _val_only),
    "remove_clip": sets("trainer.remove_clip"),
    "logger_config": sets("trainer.logger", convert=listed),
    "exp_name": Flag("`trainer.experiment_name`", _experiment_name),
    "suffix": Flag("is appended to `trainer.experiment_name` with `_`", _suffix),
    "motivation_mode": Flag(
        "with `--val_only True` runs `python -m verl.trainer.main_analysis`, [the paper's analysis](docs/analysis.md), "
        "with `analysis.mode`; without that flag, or with `disable`: trains",
        _motivation_mode,
    ),
    "plot_x_metrics": without_effect(NO_PLOTS),
    "plot_y_metrics": without_effect(NO_PLOTS),
    "plot_layer": Flag(OF_ANALYSIS.format("layer"), lambda value, line: []),
    "confidence_k": Flag(OF_ANALYSIS.format("confidence_k"), lambda value, line: []),
}
"""Every flag of the release: name without dashes -> its translation."""


def translate(arguments: Sequence[str]) -> list[str]:
    """The Hydra command line for the arguments of ``train.sh``: overrides, then Hydra's own flags.

    Overrides win over flags, whatever the order of the arguments. Notes go to stderr.

    Raises:
        FlagError: an unknown flag, or a missing or unsupported value.
        ConfigError: an override that does not fit.
    """
    line = _without_retired_options(sort_arguments(arguments))
    overrides_of_line, flags_of_hydra = translate_overrides(line.overrides, line.hydra)
    line = replace(line, overrides=overrides_of_line, hydra=flags_of_hydra)
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
        if flag.note and value and value.lower() != "false":
            note(f"--{name} {value} {flag.note}")
        overrides |= {override_key(override): override for override in translated}
    # Hydra refuses a group that is chosen twice, so an override replaces the flag. Hydra's parser expects all overrides
    # next to each other, so its own flags come last.
    merged = [*(o for key, o in overrides.items() if key not in line.keys), *line.overrides]
    if line.flags.get("compute_log_effective_rank", "").lower() == "true":
        merged = _with_log_effective_rank(merged)
    return [*merged, *line.hydra]


def _without_retired_options(line: CommandLine) -> CommandLine:
    """``line`` with the flags that stand for its retired options."""
    retired = {override_key(o): o.partition("=")[2] for o in line.overrides if override_key(o) in RETIRED_OPTIONS}
    overrides = [o for o in line.overrides if override_key(o) not in RETIRED_OPTIONS]
    flags = line.flags | {key.rpartition(".")[2]: value for key, value in retired.items()}
    return replace(line, flags=flags, overrides=overrides)


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
