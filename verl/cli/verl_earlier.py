"""Names that veRL's options had in earlier releases, 0.1 to 0.6, and a few of its best-known forks."""

from verl.cli.values import FlagError, quoted
from verl.cli.verl_conversions import Line, Option, accepted, by, only, same, unquoted
from verl.cli.verl_learning import EARLIER_RULES, overlong_buffer, ratio_bounds
from verl.cli.verl_models import ACTOR, MEMORY, PROFILER, REF
from verl.cli.verl_policy import CORRECTION, bypasses, set_loss
from verl.cli.verl_rollout import ROLLOUT
from verl.config.overrides import NOT_SUPPORTED

_WITH_THRESHOLD = by("read with `algorithm.rollout_is_threshold`", lambda value, _: [])


def _token_level(value: str, line: Line) -> list[str]:
    return [f"actor.loss_agg_mode={'token-mean' if same(value) == 'true' else 'seq-mean-token-mean'}"]


def _corrects(line: Line) -> bool:
    """Whether a command of release 0.6 corrects for the engine, and does not only log how far it is."""
    off = line.text("algorithm.rollout_is_threshold") in ("null", "0", "0.0")
    return not off and line.text("algorithm.rollout_is", "false") == "true"


def _veto(value: str, line: Line) -> list[str]:
    return [f"{CORRECTION}.rollout_token_veto_threshold={same(value)}"] if _corrects(line) else []


def _importance(value: str, line: Line) -> list[str]:
    """Of ``algorithm.rollout_is_threshold``, which turned the correction of release 0.6 on."""
    text, level = same(unquoted(value)), line.text("algorithm.rollout_is_level", "token")
    if not _corrects(line):
        return []  # metrics alone
    weights = [f"actor.tis_level={level}", f"actor.tis_cap={text}"]
    if line.text("algorithm.rollout_is_mode", "truncate") == "truncate":
        if level == "geometric":
            raise FlagError(
                "responses have no geometric weights; set algorithm.rollout_is_mode=mask, or a level of "
                "token or sequence"
            )
        return weights
    if level not in EARLIER_RULES:
        raise FlagError(f"algorithm.rollout_is_level={level}: must be one of {', '.join(EARLIER_RULES)}")
    bounds = ratio_bounds(text, line.text("algorithm.rollout_is_threshold_lower"))
    rejected = [
        f"{CORRECTION}.rollout_rs={EARLIER_RULES[level]}",
        f"{CORRECTION}.rollout_rs_threshold={quoted(bounds)}",
    ]
    # Geometric means that pass are near 1, and weigh nothing.
    return [*([] if level == "geometric" else weights), *rejected]


EARLIER_OPTIONS: dict[str, Option] = {
    "reward_model.model.fsdp_config.min_num_params": MEMORY,
    f"{ACTOR}.use_token_level_loss": by(
        "`actor.loss_agg_mode`: true is `token-mean`, false `seq-mean-token-mean`", _token_level
    ),
    f"{REF}.model": only(["null"], "the reference is the model before training, `model.path`"),
    f"{ROLLOUT}.chat_scheduler": only(["null"], NOT_SUPPORTED["rollout.agent"]),
    f"{ROLLOUT}.limit_images": accepted("a number of images; rows with images are refused"),
    f"{ROLLOUT}.micro_rollout_batch_size": accepted("the engine batches requests by itself, `rollout.max_num_seqs`"),
    "algorithm.rollout_is_threshold": by(
        "with `rollout_is`: `actor.tis_level` and `actor.tis_cap`; with `rollout_is_mode=mask` also "
        f"`{CORRECTION}.rollout_rs` with these bounds, and for the level `geometric` that alone",
        _importance,
    ),
    "algorithm.rollout_is": _WITH_THRESHOLD,
    "algorithm.rollout_is_level": _WITH_THRESHOLD,
    "algorithm.rollout_is_mode": _WITH_THRESHOLD,
    "algorithm.rollout_is_threshold_lower": _WITH_THRESHOLD,
    "algorithm.rollout_is_veto_threshold": by(
        f"with `rollout_is` and `rollout_is_threshold`: `{CORRECTION}.rollout_token_veto_threshold`", _veto
    ),
    f"{CORRECTION}.use_policy_gradient": by(
        "with `bypass_mode`: true is `loss_type=reinforce`, unless that is given",
        lambda _, line: set_loss(line) if bypasses(line) else [],
    ),
    **overlong_buffer("custom_reward_function.overlong_buffer"),
    "trainer.rejection_sample": only(
        ["false"], "groups without a difference are left out by `algorithm.filter_groups`", "set its `enable`"
    ),
    "trainer.rejection_sample_multiplier": accepted("used by a fork with `trainer.rejection_sample` alone"),
    "trainer.controller_nsight_options.*": PROFILER,
    "trainer.worker_nsight_options.*": PROFILER,
}
