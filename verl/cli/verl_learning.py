"""veRL's groups ``algorithm``, ``critic`` and what scores responses: what each option becomes here."""

from verl.cli.values import FlagError, quoted
from verl.cli.verl_conversions import (
    Line,
    Option,
    accepted,
    by,
    choices,
    entries,
    is_null,
    only,
    path,
    refused,
    same,
    to,
    unquoted,
)
from verl.cli.verl_models import (
    CLASS,
    MEMORY,
    NO_LIBRARY,
    NO_SHUFFLE,
    PROFILER,
    SAME_SIZE,
    SEED,
    SHARDING,
    SPEED,
    ULYSSES,
    checkpoint_options,
    fsdp_options,
    model_options,
    optim_options,
    per_gpu,
    unless_null,
)
from verl.cli.verl_policy import CORRECTION, KL_TYPE, bypasses, loss_of, set_loss

ESTIMATORS = {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"}


def _generation_batches(value: str, line: Line) -> list[str]:
    text = same(value)
    unlimited = text == "null" or text == "0" or text.startswith("-")
    return [f"algorithm.filter_groups.max_num_gen_batches={0 if unlimited else text}"]


def _reweighted(value: str, line: Line) -> list[str]:
    return [f"algorithm.use_pf_ppo={same(value)}"] if line.text("algorithm.adv_estimator", "gae") == "gae" else []


def _bypass(value: str, line: Line) -> list[str]:
    return [f"actor.bypass_mode={same(value)}", *(set_loss(line) if bypasses(line) else [])]


def _weights(value: str, line: Line) -> list[str]:
    clipped = bypasses(line) and loss_of(line) == "ppo_clip"
    return [f"actor.tis_level={'none' if clipped or is_null(value) else unquoted(value)}"]


def _threshold(value: str, line: Line) -> list[str]:
    return [] if is_null(value) else [f"actor.tis_cap={same(value)}"]


EARLIER_RULES = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
"""Rules of earlier releases, whose bounds are those of p_trainer / p_rollout -> ours, of the inverse."""


def _rejection(value: str, line: Line) -> list[str]:
    rule = unquoted(value)
    return [f"{CORRECTION}.rollout_rs={'null' if is_null(value) else quoted(EARLIER_RULES.get(rule, rule))}"]


def _rejection_threshold(value: str, line: Line) -> list[str]:
    rule = line.text(f"{CORRECTION}.rollout_rs")
    if is_null(value) or rule == "null":
        return []
    bounds = unquoted(value)
    if rule in EARLIER_RULES:
        bounds = ratio_bounds(bounds, line.text(f"{CORRECTION}.rollout_rs_threshold_lower"))
    return [f"{CORRECTION}.rollout_rs_threshold={quoted(bounds)}"]


def ratio_bounds(upper: str, lower: str) -> str:
    """Bounds of p_rollout / p_trainer for those of its inverse; ``lower`` null: 1 / ``upper``."""
    try:
        high = float(upper)
        low = 1 / high if lower == "null" else float(lower)
        return f"{1 / high:.12g}_{1 / low:.12g}"
    except (ValueError, ZeroDivisionError):
        raise FlagError(f"the bounds {lower} and {upper} must be numbers above 0") from None


REJECTION = by(
    f"`{CORRECTION}.rollout_rs`; `token`, `sequence` and `geometric` (earlier names) are `token_k1`, `seq_sum_k1` "
    "and `seq_mean_k1`, with the inverse bounds",
    _rejection,
)
REJECTION_THRESHOLD = by(f"`{CORRECTION}.rollout_rs_threshold`, with `rollout_rs`", _rejection_threshold)


ALGORITHM_OPTIONS = {
    "algorithm._target_": CLASS,
    "algorithm.gamma": to("algorithm.gamma"),
    "algorithm.lam": to("algorithm.lam"),
    "algorithm.adv_estimator": to(
        "algorithm.adv_estimator",
        convert=choices(ESTIMATORS),
        note="`grpo_vectorized` and `rloo_vectorized` are `grpo` and `rloo`; others than ours are refused by it",
    ),
    "algorithm.norm_adv_by_std_in_grpo": to("algorithm.norm_adv_by_std_in_grpo"),
    "algorithm.use_kl_in_reward": to("algorithm.use_kl_in_reward"),
    "algorithm.kl_penalty": to("algorithm.kl_penalty", convert=KL_TYPE),
    "algorithm.kl_ctrl._target_": CLASS,
    "algorithm.kl_ctrl.type": to("algorithm.kl_ctrl.type"),
    "algorithm.kl_ctrl.kl_coef": to("algorithm.kl_ctrl.kl_coef"),
    "algorithm.kl_ctrl.horizon": to("algorithm.kl_ctrl.horizon"),
    "algorithm.kl_ctrl.target_kl": to("algorithm.kl_ctrl.target_kl"),
    "algorithm.mask_truncated_samples": to("trainer.remove_clip", note="an option of DeepScaleR's veRL"),
    "algorithm.use_pf_ppo": by(
        "`algorithm.use_pf_ppo`, with `gae`; veRL's other estimators do not read it", _reweighted
    ),
    "algorithm.pf_ppo.reweight_method": to("algorithm.pf_ppo.reweight_method"),
    "algorithm.pf_ppo.weight_pow": to("algorithm.pf_ppo.weight_pow"),
    "algorithm.filter_groups._target_": CLASS,
    "algorithm.filter_groups.enable": to("algorithm.filter_groups.enable"),
    "algorithm.filter_groups.metric": by(
        "`algorithm.filter_groups.metric`; null: left as it is",
        lambda value, _: [] if is_null(value) else [f"algorithm.filter_groups.metric={unquoted(value)}"],
    ),
    "algorithm.filter_groups.max_num_gen_batches": by(
        "`algorithm.filter_groups.max_num_gen_batches`; null and numbers below 0 are 0, no limit", _generation_batches
    ),
    f"{CORRECTION}.rollout_is": by(
        "`actor.tis_level`; null is `none`, and so is all with `bypass_mode` and `loss_type=ppo_clip`, whose ratio is "
        "to the engine already",
        _weights,
    ),
    f"{CORRECTION}.rollout_is_threshold": by("`actor.tis_cap`", _threshold),
    f"{CORRECTION}.rollout_rs": REJECTION,
    f"{CORRECTION}.rollout_rs_threshold": REJECTION_THRESHOLD,
    f"{CORRECTION}.rollout_rs_threshold_lower": by(
        "with the earlier names of `rollout_rs`, the lower bound of `rollout_rs_threshold`", lambda value, _: []
    ),
    f"{CORRECTION}.rollout_token_veto_threshold": to(
        f"{CORRECTION}.rollout_token_veto_threshold", note="an option of veRL's earlier versions"
    ),
    f"{CORRECTION}.bypass_mode": by(
        "`actor.bypass_mode`; true: the policy loss is `loss_type`'s, whatever `loss_mode` says, as in veRL. Tokens "
        "are rejected by the policy before the update, in veRL by the policy as it learns",
        _bypass,
    ),
    f"{CORRECTION}.loss_type": by(
        "with `bypass_mode`: `actor.policy_loss`, `ppo_clip` or, for `reinforce`, `gpg`",
        lambda _, line: set_loss(line) if bypasses(line) else [],
    ),
    f"{CORRECTION}.rollout_is_batch_normalize": to("actor.tis_normalize"),
}

CRITIC_OPTIONS = {
    **optim_options("critic.optim", "critic.optim"),
    **fsdp_options(
        "critic.model.fsdp_config", "critic.model.fsdp", "critic.model.param_dtype", f"critic.model.{ULYSSES}"
    ),
    **model_options("critic.model", "critic.model"),
    **checkpoint_options("critic.checkpoint", of_policy=False),
    "critic.model.tokenizer_path": accepted("the critic reads the policy's tokens"),
    "critic._target_": CLASS,
    "critic.rollout_n": SAME_SIZE,
    "critic.strategy": SHARDING,
    "critic.enable": Option(
        "accepted",
        "only what `algorithm.adv_estimator` decides: `gae` alone has a critic",
        lambda value, line: _critic_enabled(value, line),
    ),
    "critic.ppo_mini_batch_size": to("critic.ppo_mini_batch_size"),
    "critic.ppo_micro_batch_size": per_gpu("critic.micro_batch_size_per_gpu", f"critic.{ULYSSES}"),
    "critic.ppo_micro_batch_size_per_gpu": unless_null("critic.micro_batch_size_per_gpu"),
    "critic.forward_micro_batch_size": accepted("`critic.micro_batch_size_per_gpu` holds for both passes"),
    "critic.forward_micro_batch_size_per_gpu": accepted("`critic.micro_batch_size_per_gpu` holds for both passes"),
    "critic.use_dynamic_bsz": to("critic.use_dynamic_bsz"),
    "critic.ppo_max_token_len_per_gpu": to("critic.ppo_max_token_len_per_gpu"),
    "critic.forward_max_token_len_per_gpu": accepted("`critic.ppo_max_token_len_per_gpu` holds for both passes"),
    "critic.ppo_epochs": to("critic.ppo_epochs"),
    "critic.shuffle": NO_SHUFFLE,
    "critic.data_loader_seed": SEED,
    "critic.cliprange_value": to("critic.cliprange_value"),
    "critic.loss_agg_mode": only(["token-mean"], "the critic's loss is the mean over tokens", "leave it out"),
    "critic.profiler.*": PROFILER,
    f"critic.{ULYSSES}": to(f"critic.model.{ULYSSES}"),
    "critic.grad_clip": to("critic.optim.grad_clip"),
    "critic.megatron.*": refused("Megatron is not supported; models are sharded by FSDP2"),
}


def _own_function(prefix: str) -> dict[str, Option]:
    """A user's reward function."""

    def translate(value: str, line: Line) -> list[str]:
        if is_null(value):
            return []
        file = unquoted(path(value)).removeprefix("pkg://").removeprefix("file://")
        name = line.text(f"{prefix}.name", "compute_score")
        return [f"reward_score.custom_functions=[{quoted(f'*={file}:{name}')}]"]

    functions = "`reward_score.custom_functions`: `*=PATH:NAME`, the function for every data source"
    return {
        f"{prefix}.path": by(functions, translate),
        f"{prefix}.name": by(f"names the function of `{prefix}.path`", lambda value, _: []),
        f"{prefix}.reward_kwargs": entries("reward_score.custom_kwargs", f"with `{prefix}.path`"),
    }


def _critic_enabled(value: str, line: Line) -> list[str]:
    has_critic = str(line.text("algorithm.adv_estimator", "gae") == "gae").lower()
    if not is_null(value) and same(value) != has_critic:
        raise FlagError("algorithm.adv_estimator decides: gae alone has a critic; leave it out")
    return []


def _maximum(value: str, line: Line) -> list[str]:
    longest = line.text("data.max_response_length", "512")
    if not is_null(value) and same(value) not in (longest, "${data.max_response_length}"):
        raise FlagError(f"the buffer ends at data.max_response_length={longest}; leave it out")
    return []


MANAGER = Option(
    "accepted",
    "only `naive`, `dapo` or `prime`: each response is scored by itself; `reward_score.overlong_buffer` is `dapo`'s "
    "penalty. Others are refused: name your function in `custom_reward_function.path`",
    lambda value, line: _manager(value),
)


def _manager(value: str) -> list[str]:
    if unquoted(value) not in ("naive", "dapo", "prime", "null"):
        raise FlagError(
            "responses are scored one by one, as by naive, dapo and prime; name your function in "
            "custom_reward_function.path"
        )
    return []


def overlong_buffer(prefix: str) -> dict[str, Option]:
    """DAPO's overlong penalty."""
    ours = "reward_score.overlong_buffer"
    return {
        f"{prefix}.enable": to(f"{ours}.enable"),
        f"{prefix}.len": by(
            f"`{ours}.len`; 0 is left out", lambda value, _: [] if value == "0" else [f"{ours}.len={value}"]
        ),
        f"{prefix}.penalty_factor": to(f"{ours}.penalty_factor"),
        f"{prefix}.log": accepted("`reward_score/*` is always logged"),
    }


_RULE = "`reward_model.rule_weight=0` in `preset=verl`: as in veRL, the model's score replaces the verifier's"
_OWN_TOKENIZER = accepted("the reward model uses its own tokenizer and chat template")
_NO_ENGINE = accepted("the reward model scores in the run's own workers, without an engine")
_POOL = accepted("the reward model shares the run's workers; placement changes no score")


def _processes(value: str) -> str:
    """A number of processes, of which veRL's default is one."""
    return "0" if unquoted(value) == "1" else same(value)


_VERIFIERS = to("reward_score.num_workers", convert=_processes, note="1 is 0, what the machine can spare")

REWARD_OPTIONS = {
    "reward_model.enable": to("reward_model.enable", note=_RULE),
    "reward_model.enable_resource_pool": _POOL,
    "reward_model.n_gpus_per_node": _POOL,
    "reward_model.nnodes": _POOL,
    "reward_model.strategy": SHARDING,
    "reward_model.model.input_tokenizer": _OWN_TOKENIZER,
    "reward_model.model.path": to("reward_model.model.path", convert=path),
    "reward_model.model.external_lib": NO_LIBRARY,
    "reward_model.model.type": only(["discriminative"], "a reward model has one output, its score"),
    "reward_model.model.trust_remote_code": to("reward_model.model.trust_remote_code"),
    "reward_model.model.override_config": to("reward_model.model.override_config"),
    "reward_model.model.use_shm": SPEED,
    "reward_model.model.use_remove_padding": to("reward_model.model.use_remove_padding"),
    "reward_model.model.use_fused_kernels": MEMORY,
    **fsdp_options(
        "reward_model.model.fsdp_config",
        "reward_model.model.fsdp",
        "reward_model.model.param_dtype",
        f"reward_model.model.{ULYSSES}",
    ),
    "reward_model.micro_batch_size": per_gpu("reward_model.micro_batch_size_per_gpu", f"reward_model.{ULYSSES}"),
    "reward_model.micro_batch_size_per_gpu": unless_null("reward_model.micro_batch_size_per_gpu"),
    "reward_model.max_length": unless_null("reward_model.max_length"),
    "reward_model.use_dynamic_bsz": MEMORY,
    "reward_model.forward_max_token_len_per_gpu": MEMORY,
    "reward_model.reward_manager": MANAGER,
    "reward_model.reward_loop_source": only(["register"], "scores come from verifiers and your own functions"),
    "reward_model.reward_loop_module_path": only(["null"], "name a function in custom_reward_function.path"),
    "reward_model.reward_loop_class_name": only(["null"], "name a function in custom_reward_function.path"),
    "reward_model.launch_reward_fn_async": SPEED,
    "reward_model.sandbox_fusion.*": accepted(
        "no service runs code; a data source whose answers are code has no verifier and is refused at the start, "
        "unless `custom_reward_function.path` scores it"
    ),
    "reward_model.profiler.*": PROFILER,
    f"reward_model.{ULYSSES}": to(f"reward_model.model.{ULYSSES}"),
    "reward_model.use_reward_loop": accepted("how scores are gathered; the scores are the same"),
    "reward_model.num_workers": _VERIFIERS,
    "reward_model.rollout.*": _NO_ENGINE,
    **overlong_buffer("reward_model.reward_kwargs.overlong_buffer_cfg"),
    **overlong_buffer("reward.reward_kwargs.overlong_buffer_cfg"),
    **overlong_buffer("reward_model.overlong_buffer"),
    "reward_model.reward_kwargs.max_resp_len": Option(
        "accepted", "only `data.max_response_length`, which sets it", _maximum
    ),
    "reward.reward_kwargs.max_resp_len": Option("accepted", "only `data.max_response_length`, which sets it", _maximum),
    "reward.reward_manager.name": MANAGER,
    "reward_manager._target_": CLASS,
    "reward_manager.source": only(["register"], "scores come from verifiers and your own functions"),
    "reward_manager.name": MANAGER,
    "reward_manager.module._target_": CLASS,
    "reward_manager.module.path": only(["null"], "name a function in custom_reward_function.path"),
    "reward_manager.module.name": accepted("used by veRL with `reward_manager.module.path` alone, which is refused"),
    "reward.num_workers": _VERIFIERS,
    **_own_function("custom_reward_function"),
    **_own_function("reward.custom_reward_function"),
}
