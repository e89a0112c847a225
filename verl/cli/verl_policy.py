"""veRL's groups ``actor_rollout_ref.actor``, ``.ref`` and ``.model``: what each option becomes here."""

from typing import get_args

from verl.cli.values import FlagError
from verl.cli.verl_conversions import (
    Line,
    Option,
    accepted,
    by,
    choices,
    is_null,
    names,
    only,
    path,
    refused,
    same,
    to,
    unquoted,
)
from verl.cli.verl_models import (
    ACTOR,
    CLASS,
    MEMORY,
    MODEL,
    NO_SHUFFLE,
    PROFILER,
    REF,
    SAME_SIZE,
    SHARDING,
    SPEED,
    ULYSSES,
    alpha_of,
    checkpoint_options,
    fsdp_options,
    model_options,
    optim_options,
    per_gpu,
    unless_null,
)
from verl.config.policy_losses import SEQUENCE_LOSSES
from verl.config.signal import KLType

LOSSES = {"vanilla": "ppo_clip", "geo_mean": "gmpo"}
BYPASS_LOSSES = {"ppo_clip": "ppo_clip", "reinforce": "gpg"}
"""``loss_type`` of ``rollout_correction.bypass_mode``, which veRL reads instead of ``loss_mode`` -> ours."""
CORRECTION = "algorithm.rollout_correction"


def bypasses(line: Line) -> bool:
    """Whether the ratios of a command are to the engine's log-probabilities."""
    return line.text(f"{CORRECTION}.bypass_mode", "false") == "true"


def loss_of(line: Line) -> str:
    """Our policy loss for a command."""
    if bypasses(line):
        earlier = line.text(f"{CORRECTION}.use_policy_gradient", "false") == "true"
        kind = line.text(f"{CORRECTION}.loss_type", "reinforce" if earlier else "ppo_clip")
        if kind not in BYPASS_LOSSES:
            raise FlagError(f"{CORRECTION}.loss_type={kind}: must be {' or '.join(BYPASS_LOSSES)}")
        return BYPASS_LOSSES[kind]
    mode = line.text(f"{ACTOR}.policy_loss.loss_mode", line.text(f"{ACTOR}.loss_mode", "vanilla"))
    return LOSSES.get(mode, mode)


def set_loss(line: Line) -> list[str]:
    """The overrides that our policy loss takes."""
    loss = loss_of(line)
    overrides = [f"actor.policy_loss={loss}"]
    if loss != "ppo_clip":
        overrides.append("actor.clip_ratio_c=null")
    if loss in SEQUENCE_LOSSES:  # veRL's do not look at loss_agg_mode
        overrides.append("actor.loss_agg_mode=seq-mean-token-mean")
    return overrides


def _dual_clip(value: str, line: Line) -> list[str]:
    return [f"actor.clip_ratio_c={same(value)}"] if loss_of(line) == "ppo_clip" else []


def _aggregation(value: str, line: Line) -> list[str]:
    return [] if loss_of(line) in SEQUENCE_LOSSES else [f"actor.loss_agg_mode={same(value)}"]


def _earlier(name: str) -> Option:
    """An option that stood outside of ``policy_loss``."""

    def translate(value: str, line: Line) -> list[str]:
        given = line.text(f"{ACTOR}.policy_loss.{name}") != "null"
        return [] if given or is_null(value) else [f"actor.{name}={same(value)}"]

    return by(f"`policy_loss.{name}`, which comes first (an earlier name)", translate)


def _lower_clip(value: str, line: Line) -> list[str]:
    text = same(value)
    if text == "null":
        return []  # clip_ratio decides
    try:
        # A ratio is never below 1 - 1. GMPO clips its logarithm, which has no such bound.
        is_ratio = loss_of(line) != "gmpo"
        text = "1.0" if is_ratio and float(text) > 1 else text
    except ValueError:
        pass
    return [f"actor.clip_ratio_low={text}"]


def _clip(value: str, line: Line) -> list[str]:
    sides = {"low": _lower_clip(value, line), "high": _high_clip(value, line)}
    return [o for side in sides for o in sides[side] if line.text(f"{ACTOR}.clip_ratio_{side}") == "null"]


def _high_clip(value: str, line: Line) -> list[str]:
    return [] if is_null(value) else [f"actor.clip_ratio_high={same(value)}"]


KL_NAMES = {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}
KL_TYPE = choices({theirs: ours for theirs, ours in KL_NAMES.items() if theirs not in get_args(KLType)})

ACTOR_OPTIONS = {
    **optim_options(f"{ACTOR}.optim", "actor.optim"),
    **fsdp_options(f"{ACTOR}.fsdp_config", "model.fsdp", "model.param_dtype", f"model.{ULYSSES}"),
    **checkpoint_options(f"{ACTOR}.checkpoint", of_policy=True),
    **{
        f"{ACTOR}.{name}": option
        for name, option in {
            "_target_": CLASS,
            "rollout_n": SAME_SIZE,
            "strategy": SHARDING,
            "ppo_mini_batch_size": to("actor.ppo_mini_batch_size"),
            "ppo_micro_batch_size": per_gpu("actor.micro_batch_size_per_gpu", f"{ACTOR}.{ULYSSES}"),
            "ppo_micro_batch_size_per_gpu": unless_null("actor.micro_batch_size_per_gpu"),
            "use_dynamic_bsz": to("actor.use_dynamic_bsz"),
            "ppo_max_token_len_per_gpu": to("actor.ppo_max_token_len_per_gpu"),
            "clip_ratio": by(
                "`actor.clip_ratio_low` and `actor.clip_ratio_high`, unless they are given; veRL itself ignores it "
                "beside their defaults",
                _clip,
            ),
            "clip_ratio_low": by(
                "`actor.clip_ratio_low`, at most 1, below which no ratio is, but with `geo_mean`", _lower_clip
            ),
            "clip_ratio_high": by("`actor.clip_ratio_high`", _high_clip),
            "tau_pos": to("actor.tau_pos"),
            "tau_neg": to("actor.tau_neg"),
            "freeze_vision_tower": only(["false"], "models that read images are not supported"),
            "policy_loss._target_": CLASS,
            "policy_loss.loss_mode": by(
                "`actor.policy_loss`: `vanilla` is `ppo_clip`, `geo_mean` is `gmpo`, others keep their names; "
                "`actor.clip_ratio_c=null` with all but `vanilla`. With `rollout_correction.bypass_mode` its "
                "`loss_type` decides, as in veRL",
                lambda _, line: set_loss(line),
            ),
            **{
                f"policy_loss.{name}": unless_null(f"actor.{name}")
                for name in ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef")
            },
            "loss_mode": by(
                "`policy_loss.loss_mode`, which comes first (an earlier name)", lambda _, line: set_loss(line)
            ),
            **{
                name: _earlier(name)
                for name in ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef")
            },
            "clip_ratio_c": by("`actor.clip_ratio_c`, with `loss_mode=vanilla`", _dual_clip),
            "loss_agg_mode": by(
                "`actor.loss_agg_mode`; `gspo`, `geo_mean` and `sapo` average over responses whatever it says, as in "
                "veRL. Ours are means over the whole optimizer step, whatever the micro-batches",
                _aggregation,
            ),
            "loss_scale_factor": only(
                ["null"], "`seq-mean-token-sum-norm` divides by `data.max_response_length`", "scale `actor.optim.lr`"
            ),
            "entropy_coeff": to("actor.entropy_coeff"),
            "calculate_entropy": accepted("the entropy is always computed and logged"),
            "use_kl_loss": to("actor.use_kl_loss"),
            "use_prefix_grouper": SPEED,
            "use_torch_compile": SPEED,
            "use_fused_kernels": MEMORY,
            "kl_loss_coef": to("actor.kl_loss_coef"),
            "kl_loss_type": to("actor.kl_loss_type", convert=KL_TYPE),
            "ppo_epochs": to("actor.ppo_epochs"),
            "shuffle": NO_SHUFFLE,
            "data_loader_seed": accepted("used by veRL with `actor.shuffle` alone, which is refused"),
            "profiler.*": PROFILER,
            "router_replay.mode": only(["disabled"], "routes of experts are not replayed"),
            "router_replay.*": accepted("used by veRL with `router_replay.mode` alone, which is refused"),
            "grad_clip": to("actor.optim.grad_clip"),
            ULYSSES: to(f"model.{ULYSSES}"),
            "entropy_from_logits_with_chunking": accepted("entropies are always computed in chunks"),
            "entropy_checkpointing": MEMORY,
            "use_remove_padding": to("model.use_remove_padding"),
            "calculate_sum_pi_squared": accepted("computed if `algorithm.adv_estimator` needs it"),
            "sum_pi_squared_checkpointing": MEMORY,
            "use_rollout_log_probs": accepted(
                "ratios are always to the log-probabilities of the step; `rollout_correction.bypass_mode` makes them "
                "the engine's"
            ),
            "tis_imp_ratio_cap": by(
                "`actor.tis_level=token` and `actor.tis_cap`, if it is above 0 (an earlier name)",
                lambda value, _: (
                    []
                    if is_null(value) or value.startswith("-") or unquoted(value) in ("0", "0.0")
                    else ["actor.tis_level=token", f"actor.tis_cap={value}"]
                ),
            ),
            "megatron.*": refused("Megatron is not supported; models are sharded by FSDP2, set actor.fsdp_config"),
        }.items()
    },
}

_AS_POLICY = "log-probabilities of the reference are computed in batches as those of the policy, `rollout.log_prob_*`"

REF_OPTIONS = {
    **fsdp_options(f"{REF}.fsdp_config", "", "", ""),
    **{
        f"{REF}.{name}": option
        for name, option in {
            "_target_": CLASS,
            "rollout_n": SAME_SIZE,
            "strategy": SHARDING,
            "use_torch_compile": SPEED,
            "log_prob_micro_batch_size": accepted(_AS_POLICY),
            "log_prob_micro_batch_size_per_gpu": accepted(_AS_POLICY),
            "log_prob_use_dynamic_bsz": accepted(_AS_POLICY),
            "log_prob_max_token_len_per_gpu": accepted(_AS_POLICY),
            "profiler.*": PROFILER,
            "router_replay.mode": only(["disabled"], "routes of experts are not replayed"),
            "router_replay.*": accepted("used by veRL with `router_replay.mode` alone, which is refused"),
            ULYSSES: accepted("the reference splits sequences as the policy does"),
            "entropy_from_logits_with_chunking": accepted("no entropy of the reference is computed"),
            "entropy_checkpointing": accepted("no entropy of the reference is computed"),
            "model.path": only(["null"], "the reference is the model before training, `model.path`"),
            "megatron.*": refused("Megatron is not supported; models are sharded by FSDP2"),
        }.items()
    },
}


def _excluded(value: str, line: Line) -> list[str]:
    if not is_null(value) and line.number(f"{MODEL}.lora_rank", 0) > 0:
        raise FlagError("adapters are placed by name; list the layers that get one in target_modules")
    return []


MODEL_OPTIONS = {
    **model_options(MODEL, "model"),
    f"{MODEL}.tokenizer_path": only(["null"], "the tokenizer is read from the model's folder", "put it there"),
    f"{MODEL}.custom_chat_template": only(["null"], "the chat template is the tokenizer's", "write it there"),
    f"{MODEL}.torch_dtype": accepted("weights are held in float32; `fsdp_config.dtype` sets the precision of products"),
    f"{MODEL}.exclude_modules": by(
        "nothing without LoRA; with it, refused: list the layers in `target_modules`", _excluded
    ),
    f"{MODEL}.lora_adapter_path": to("model.lora_adapter_path", convert=path),
    f"{MODEL}.lora.rank": to("model.lora.rank"),
    f"{MODEL}.lora.alpha": alpha_of("model.lora.alpha"),
    f"{MODEL}.lora.target_modules": to("model.lora.target_modules", convert=names),
    f"{MODEL}.lora.dropout": to("model.lora.dropout"),
    f"{MODEL}.lora.merge": accepted("the engine always gets the merged weights"),
    f"{MODEL}.mtp.enable": only(["false"], "heads that predict several tokens are not trained"),
    f"{MODEL}.mtp.*": accepted("used by veRL with `mtp.enable` alone, which is refused"),
}
