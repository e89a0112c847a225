"""What ``by`` in verl_options.yaml names: options of veRL's whose meaning depends on the rest of the command."""

import math
import re

from verl.cli.tables import CommandLine, Option
from verl.cli.values import FlagError, elements, is_null, note, path, quoted, same, unquoted
from verl.config.actor import SEQUENCE_LOSSES

ACTOR, ROLLOUT = (f"actor_rollout_ref.{group}" for group in ("actor", "rollout"))
CORRECTION = "algorithm.rollout_correction"


# The policy loss. With bypass_mode veRL reads loss_type of rollout_correction instead of loss_mode.

LOSSES = {"vanilla": "ppo_clip", "geo_mean": "gmpo"}
BYPASS_LOSSES = {"ppo_clip": "ppo_clip", "reinforce": "gpg"}


def bypasses(line: CommandLine) -> bool:
    """Whether the ratios of a command are to the engine's log-probabilities."""
    return line.text(f"{CORRECTION}.bypass_mode", "false") == "true"


def loss_of(line: CommandLine) -> str:
    """Our policy loss for a command."""
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
    if loss != "ppo_clip":
        overrides.append("actor.clip_ratio_c=null")
    if loss in SEQUENCE_LOSSES:  # veRL's do not look at loss_agg_mode
        overrides.append("actor.loss_agg_mode=seq-mean-token-mean")
    return overrides


def bypass_mode(option: Option, value: str, line: CommandLine) -> list[str]:
    return [*option.assign(value), *(policy_loss(option, value, line) if bypasses(line) else [])]


def rollout_is(option: Option, value: str, line: CommandLine) -> list[str]:
    clipped = bypasses(line) and loss_of(line) == "ppo_clip"
    return option.assign("none" if clipped or is_null(value) else value)


def clip_ratio_c(option: Option, value: str, line: CommandLine) -> list[str]:
    return option.assign(value) if loss_of(line) == "ppo_clip" else []


def loss_agg_mode(option: Option, value: str, line: CommandLine) -> list[str]:
    return [] if loss_of(line) in SEQUENCE_LOSSES else option.assign(value)


def clip_ratio_low(option: Option, value: str, line: CommandLine) -> list[str]:
    text = same(value)
    try:
        # A ratio is never below 1 - 1. GMPO clips its logarithm, which has no such bound.
        text = "1.0" if float(text) > 1 and loss_of(line) != "gmpo" else text
    except ValueError:
        pass
    return [f"actor.clip_ratio_low={text}"]


def clip_ratio(option: Option, value: str, line: CommandLine) -> list[str]:
    if is_null(value):
        return []
    sides = {"low": clip_ratio_low(option, value, line), "high": [f"actor.clip_ratio_high={same(value)}"]}
    return [o for side in sides for o in sides[side] if is_null(line.text(f"{ACTOR}.clip_ratio_{side}"))]


def staleness_threshold(option: Option, value: str, line: CommandLine) -> list[str]:
    text = unquoted(value)
    try:
        ahead = float(text)
    except ValueError:
        raise FlagError("must be a number") from None
    if not ahead.is_integer():
        raise FlagError(
            "is a share of a batch that may be begun ahead, here whole batches are; set async_training.max_staleness, "
            f"such as {math.ceil(ahead)}"
        )
    return option.assign(f"{ahead:.0f}")


def trigger_parameter_sync_step(option: Option, value: str, line: CommandLine) -> list[str]:
    sizes = (line.number("async_training.require_batches", 1), line.number(f"{ACTOR}.ppo_mini_batch_size", 256))
    return option.assign(str(line.number(option.name, 4) * math.prod(sizes)))


def hybrid_engine(option: Option, value: str, line: CommandLine) -> list[str]:
    apart, together = line.number("rollout.nnodes", 0) > 0, same(value).lower() == "true"
    if together == apart:
        fix = "0: engines share the trainer's workers" if together else "1 or more: engines of their own need machines"
        raise FlagError(f"set rollout.nnodes={fix}")
    return []


# Rejected responses.

RATIO_RULES = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
"""Rules whose bounds are those of p_trainer / p_rollout -> ours, of the inverse."""


def rollout_rs(option: Option, value: str, line: CommandLine) -> list[str]:
    rule = unquoted(value)
    return option.assign("null" if is_null(value) else quoted(RATIO_RULES.get(rule, rule)))


def rollout_rs_threshold(option: Option, value: str, line: CommandLine) -> list[str]:
    rule = line.text(f"{CORRECTION}.rollout_rs")
    if rule not in RATIO_RULES:
        return [] if rule == "null" else option.assign(quoted(unquoted(value)))
    upper, lower = unquoted(value), line.text(f"{CORRECTION}.rollout_rs_threshold_lower")
    try:
        high = float(upper)
        low = 1 / high if lower == "null" else float(lower)
        return option.assign(quoted(f"{1 / high:.12g}_{1 / low:.12g}"))
    except (ValueError, ZeroDivisionError):
        raise FlagError(f"the bounds {lower} and {upper} must be numbers above 0") from None


# Sizes that follow from the number of workers, and steps from the sizes of batches.


def workers(line: CommandLine) -> int:
    """Workers of the run: GPUs of all machines."""
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
    if count <= 0:
        return []
    batch = line.number("data.train_batch_size", 1024)
    mini = line.number(f"{group}.ppo_mini_batch_size", line.number(f"{ACTOR}.ppo_mini_batch_size", 256))
    epochs = line.number(f"{group}.ppo_epochs", line.number(f"{ACTOR}.ppo_epochs", 1))
    return option.assign(str(count * epochs * max(1, batch // mini)))


def warmup_ratio(option: Option, value: str, line: CommandLine) -> list[str]:
    first = line.number(option.of, -1) >= 0
    return [] if first else [f"{option.to[0].removesuffix('_ratio')}=-1", *option.assign(value)]


def critic_warmup(option: Option, value: str, line: CommandLine) -> list[str]:
    return option.assign(str(max(0, line.number(option.name, 0) - 1)))


# What another option decides.


def equals(option: Option, value: str, line: CommandLine) -> list[str]:
    """A length that veRL reads from ``of``, by default 512."""
    expected = line.text(option.of, "512")
    if not is_null(value) and same(value) not in (expected, f"${{{option.of}}}"):
        raise FlagError(f"{option.of}={expected} sets it; leave it out")
    return []


def longest(line: CommandLine) -> int:
    """Tokens of the longest prompt and response."""
    return sum(line.number(f"data.max_{part}_length", 512) for part in ("prompt", "response"))


def learns_values(line: CommandLine) -> bool:
    """Whether the command has a critic."""
    return line.text("algorithm.adv_estimator", "gae") == "gae"


def critic_enable(option: Option, value: str, line: CommandLine) -> list[str]:
    if same(value) != str(learns_values(line)).lower():
        raise FlagError("algorithm.adv_estimator decides: gae alone has a critic; leave it out")
    return []


def exclude_modules(option: Option, value: str, line: CommandLine) -> list[str]:
    if not is_null(value) and line.number("actor_rollout_ref.model.lora_rank", 0) > 0:
        raise FlagError("adapters are placed by name; list the layers that get one in target_modules")
    return []


def override_config(option: Option, value: str, line: CommandLine) -> list[str]:
    if "attn_implementation" in value:
        raise FlagError("attn_implementation is an option of its own; set override_config.attn_implementation")
    return option.assign(value)


def save_contents(option: Option, value: str, line: CommandLine) -> list[str]:
    return option.assign(str("hf_model" in elements(value)).lower())


def resume_from_path(option: Option, value: str, line: CommandLine) -> list[str]:
    return option.assign(path(value)) if line.text("trainer.resume_mode") in ("resume_path", "path") else []


def plain_name(option: Option, value: str, line: CommandLine) -> list[str]:
    """A name of any characters, such as one that begins with a model's hub id, as one that a folder may have."""
    name = unquoted(value)
    if "${" in name:
        return option.assign(value)
    legal = re.sub(r"[^\w.+-]+", "_", name, flags=re.ASCII).lstrip("._+-")
    if legal != name:
        note(f"{option.name}: {legal}")
    return [f"{option.to[0]}={quoted(legal)}"]


def custom_function(option: Option, value: str, line: CommandLine) -> list[str]:
    file = unquoted(path(value)).removeprefix("pkg://").removeprefix("file://")
    name = line.text(option.of, "compute_score")
    return [f"{option.to[0]}=[{quoted(f'*={file}:{name}')}]"]
