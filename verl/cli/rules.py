"""Loads the option tables, and translates options whose meaning depends on other options of the command."""

import math
import os
from pathlib import Path, PurePath

from verl.cli.tables import CommandLine, Option, load_table
from verl.cli.values import FlagError, elements, is_null, literal, note, path, quoted, same, unquoted
from verl.config.actor import LOSS_OPTIONS, SEQUENCE_LOSSES
from verl.config.checks import join_source
from verl.config.load import compose_config
from verl.config.ppo import PPOConfig

ACTOR, ROLLOUT = (f"actor_rollout_ref.{group}" for group in ("actor", "rollout"))
CORRECTION = "algorithm.rollout_correction"

# veRL's policy loss. With bypass_mode, veRL reads loss_type of rollout_correction instead of loss_mode.

LOSSES = {"vanilla": "ppo_clip", "geo_mean": "gmpo"}
BYPASS_LOSSES = {"ppo_clip": "ppo_clip", "reinforce": "gpg"}


def bypasses(line: CommandLine) -> bool:
    """Return whether the command computes probability ratios from the engine's log-probabilities."""
    return line.text(f"{CORRECTION}.bypass_mode", "false") == "true"


def loss_of(line: CommandLine) -> str:
    """Return the name of our policy loss that corresponds to the command's options."""
    if bypasses(line):
        kind = line.text(f"{CORRECTION}.loss_type", "ppo_clip")
        if kind not in BYPASS_LOSSES:
            raise FlagError(f"{CORRECTION}.loss_type={kind}: must be {' or '.join(BYPASS_LOSSES)}")
        return BYPASS_LOSSES[kind]
    mode = line.text(f"{ACTOR}.policy_loss.loss_mode", "vanilla")
    return LOSSES.get(mode, mode)


def policy_loss(option: Option, value: str, line: CommandLine) -> list[str]:
    loss = loss_of(line)
    overrides = [f"actor.policy_loss={loss}"]
    if "clip_ratio_c" not in LOSS_OPTIONS.get(loss, ()):
        overrides.append("actor.clip_ratio_c=null")
    if loss in SEQUENCE_LOSSES:  # in veRL, these losses ignore loss_agg_mode
        overrides.append("actor.loss_agg_mode=seq-mean-token-mean")
    return overrides


def bypass_mode(option: Option, value: str, line: CommandLine) -> list[str]:
    if not bypasses(line):
        return option.assign(value)
    no_weights = [f"{CORRECTION}.rollout_is=null"] if loss_of(line) == "ppo_clip" else []
    return [*option.assign(value), *policy_loss(option, value, line), *no_weights]


def clip_ratio_low(option: Option, value: str, line: CommandLine) -> list[str]:
    text = low = same(value)
    try:
        # Ratios are never negative, so 1 sets no bound, except for GMPO, which clips log-ratios.
        low = "1.0" if float(text) > 1 and loss_of(line) != "gmpo" else text
    except ValueError:
        pass
    return [f"{option.to[0]}={low}", *(f"{other}={text}" for other in option.to[1:])]


# veRL's rejection rules.

RATIO_RULES = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
"""Maps rules with bounds on p_trainer / p_rollout to our rules, which bound the inverse ratio."""


def rollout_rs(option: Option, value: str, line: CommandLine) -> list[str]:
    rule = unquoted(value)
    return option.assign("null" if is_null(value) else quoted(RATIO_RULES.get(rule, rule)))


def rollout_rs_threshold(option: Option, value: str, line: CommandLine) -> list[str]:
    if line.text(f"{CORRECTION}.rollout_rs") not in RATIO_RULES:
        return option.assign(unquoted(value))
    upper, lower = unquoted(value), line.text(f"{CORRECTION}.rollout_rs_threshold_lower")
    try:
        high = float(upper)
        low = 1 / high if lower == "null" else float(lower)
        return option.assign(f"{1 / high:.12g}_{1 / low:.12g}")
    except (ValueError, ZeroDivisionError):
        raise FlagError(f"the bounds {lower} and {upper} must be numbers above 0") from None


# veRL's distillation.

DISTILLATION = "distillation.distillation_loss"


def distillation_loss(option: Option, value: str, line: CommandLine) -> list[str]:
    mode = line.text(f"{DISTILLATION}.loss_mode", "k3")
    in_advantage = line.text(f"{DISTILLATION}.use_policy_gradient", "false").lower() == "true"
    if in_advantage != (mode in ("kl", "k1")):
        raise FlagError(
            "k1 belongs to use_policy_gradient=true, the teacher in the advantage; every other mode, to false"
        )
    loss, k = ("forward_kl", line.text(f"{DISTILLATION}.topk", "32")) if mode == "forward_kl_topk" else (mode, "0")
    return [f"{option.to[0]}={'null' if in_advantage else loss}", f"{option.to[1]}={k}"]


TEACHERS = "distillation.teacher_models."
TEACHER_ENTRIES = {"key", "model_path", "num_replicas", "inference"}


def teacher_models(option: Option, value: str, line: CommandLine) -> list[str]:
    teachers = dict[str, dict[str, str]]()
    for name, text in line.options.items():
        if name.startswith(TEACHERS):
            teacher, _, entry = name.removeprefix(TEACHERS).partition(".")
            teachers.setdefault(teacher, {})[entry] = unquoted(text)
    if "teacher_model" in teachers:
        raise FlagError("veRL leaves out teacher_model where there are other teachers; rename it to teacher_model1")
    for teacher, entries in teachers.items():
        if unknown := {entry.partition(".")[0] for entry in entries} - TEACHER_ENTRIES:
            raise FlagError(f"{teacher} has no {', '.join(sorted(unknown))}; leave it out")
        if lacking := {"key", "model_path"} - entries.keys():
            raise FlagError(f"{teacher} has no {' and no '.join(sorted(lacking))}; set them")
    places = sorted((entries["key"], os.path.expanduser(entries["model_path"])) for entries in teachers.values())
    by_source, model, loss = option.to
    if len(places) == 1:  # of all data, whatever its key
        return [f"{loss}=k3", f"{model}={quoted(places[0][1])}"]
    return [f"{loss}=k3", f"{by_source}={literal([join_source(key, place) for key, place in places])}"]


def gdpo_weights(option: Option, value: str, line: CommandLine) -> list[str]:
    texts = (line.options.get(f"algorithm.gdpo_reward_{kind}", "null") for kind in ("keys", "weights"))
    names, weights = ([] if is_null(text) else elements(text) for text in texts)
    if weights and len(weights) != len(names):
        raise FlagError(f"{len(names)} gdpo_reward_keys and {len(weights)} gdpo_reward_weights; name as many")
    pairs = ",".join(f"{name}:{weight}" for name, weight in zip(names, weights or ["1.0"] * len(names), strict=True))
    return [f"++{option.to[0]}.weights={{{pairs}}}"]


# veRL options for sizes that depend on the number of workers, and for step counts that depend on batch sizes.


def workers(line: CommandLine) -> int:
    """Return the run's number of workers, which is the number of GPUs on all machines."""
    return line.number("trainer.nnodes", 1) * line.number("trainer.n_gpus_per_node", 8)


def per_worker(option: Option, value: str, line: CommandLine) -> list[str]:
    groups = max(1, workers(line) // line.number(option.of, 1))
    try:
        return option.assign(str(max(1, int(unquoted(value)) // groups)))
    except ValueError:
        raise FlagError("must be a whole number") from None


def fsdp_size(option: Option, value: str, line: CommandLine) -> list[str]:
    text = unquoted(value)
    whole = text.startswith("-") or (text.isdigit() and int(text) > workers(line))
    return option.assign("-1" if whole else value)


def warmup_steps(option: Option, value: str, line: CommandLine) -> list[str]:
    group = option.name.removesuffix(".optim.lr_warmup_steps")
    count = line.number(option.name, -1)
    batch = line.number("data.train_batch_size", 1024)
    mini = line.number(f"{group}.ppo_mini_batch_size", line.number(f"{ACTOR}.ppo_mini_batch_size", 256))
    epochs = line.number(f"{group}.ppo_epochs", line.number(f"{ACTOR}.ppo_epochs", 1))
    return option.assign(str(count * epochs * max(1, batch // mini))) if count >= 0 else []


def trigger_parameter_sync_step(option: Option, value: str, line: CommandLine) -> list[str]:
    sizes = (line.number("async_training.require_batches", 1), line.number(f"{ACTOR}.ppo_mini_batch_size", 256))
    return option.assign(str(line.number(option.name, 4) * math.prod(sizes)))


def validation_n(option: Option, value: str, line: CommandLine) -> list[str]:
    greedy = line.text(f"{ROLLOUT}.val_kwargs.temperature", "0") in ("0", "0.0")
    return option.assign("1" if greedy and not is_null(value) else value)


def custom_function(option: Option, value: str, line: CommandLine) -> list[str]:
    file = unquoted(path(value)).removeprefix("pkg://").removeprefix("file://")
    name = line.text(option.of, "compute_score")
    return [f"{option.to[0]}=[{quoted(f'*={file}:{name}')}]"]


# The release's flags and Hydra options.


def dataset_name(option: Option, value: str, line: CommandLine) -> list[str]:
    folder = f"{os.environ.get('HDFS_DATA_PATH') or 'data'}/{value}"
    files = {"data.train_files": "train.parquet", "data.val_files": "test.parquet"}
    named = [f"{name}=[{quoted(f'{folder}/{file}')}]" for name, file in files.items()]
    return [*_simplerl("--dataset_name", value, line), *named]


def train_files(option: Option, value: str, line: CommandLine) -> list[str]:
    return [*_simplerl(option.name, PurePath(unquoted(value)).parent.name, line), *option.assign(value)]


def _simplerl(name: str, folder: str, line: CommandLine) -> list[str]:
    """Return the override for complete prompts if ``folder`` is a SimpleRL-Zoo folder and ``data`` is not set."""
    if not folder.startswith("simplelr_") or "data" in line.options:
        return []
    note(f"{name}: prompts of SimpleRL-Zoo's files are complete, so they get no template (configs/data/simplerl.yaml)")
    return ["data=simplerl"]


def model_name(option: Option, value: str, line: CommandLine) -> list[str]:
    root = os.environ.get("HDFS_MODEL_PATH")
    folder = f"{root}/{value}" if root and Path(root, value).is_dir() else value
    overrides = [f"model.path={quoted(folder)}"]
    if "preset" not in line.options:
        # The embedded task's learning rate is far too high for pretrained models; the release's script uses another.
        note("--model_name: other options are from configs/preset/paper.yaml; preset=embedded uses the embedded task's")
        overrides.insert(0, "preset=paper")
    return overrides


def diff_calculator_method(option: Option, value: str, line: CommandLine) -> list[str]:
    if value == "batched":
        return ["calculator.prefix_rule=at_stride_and_whole", "calculator.max_seq_len_from=start"]
    if "batched" in value.split(","):
        raise FlagError("batched sets other options and cannot be swept; sweep over calculator.prefix_rule instead")
    return option.assign(value)


def exp_name(option: Option, value: str, line: CommandLine) -> list[str]:
    name = f"{value}_{line.flags['suffix']}" if line.flags.get("suffix") else value
    return [f"trainer.experiment_name={quoted(name)}"]


def suffix(option: Option, value: str, line: CommandLine) -> list[str]:
    if line.flags.get("exp_name"):
        return []  # exp_name already appends the suffix
    chosen = [override for override in line.overrides if override.lstrip("+").startswith("experiment=")]
    return exp_name(option, compose_config(PPOConfig, "ppo_trainer", chosen).trainer.experiment_name, line)


FLAGS = load_table("release_flags.yaml", globals(), "scalar")
"""The release's flags, without dashes."""
RELEASE = load_table("release_options.yaml", globals(), "unquoted")
"""Hydra options of the paper's release that do not exist in veRL or have a different meaning there."""
VERL = load_table("verl_options.yaml", globals(), "same")
"""veRL's options; ``group.*`` matches the options in a group that have no row of their own."""
