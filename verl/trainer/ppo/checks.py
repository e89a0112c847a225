"""What is wrong with the options of a run, and what is probably wrong, before Ray starts."""

from transformers import PreTrainedTokenizerBase

from verl.config.errors import ConfigError
from verl.config.ppo import PPOConfig
from verl.config.trainer import TrainerConfig
from verl.method.calls import MethodCalls
from verl.models.hidden_states import resolve_layers
from verl.models.info import ModelInfo, check_length, check_sequence_fits
from verl.models.loading import check_model
from verl.models.tokenizer import check_embeds_tokens, check_reads_tokens
from verl.models.value_models import check_value_architecture
from verl.rollout import check_engine_model, end_tokens
from verl.trainer.logging.step_profiler import check_profile_steps
from verl.workers.policy_loss import PolicyLoss


def start_warnings(config: PPOConfig, method: MethodCalls) -> list[str]:
    """Warnings for options that are valid but probably a mistake."""
    lines, actor = [], config.actor
    if config.compares_nothing:
        lines.append(
            f"rollout.n=1: {config.algorithm.adv_estimator} compares the responses to a prompt; with one of them the "
            "advantage is its reward, without a baseline; set rollout.n>=2"
        )
    if method.overrides("sampling") and actor.tis_level == "none" and not actor.bypass_mode:
        lines.append(
            f"{method.where}: overrides sampling, so responses come from other distributions than that at "
            "rollout.temperature, which is learned; set actor.tis_level=token, which weights them"
        )
    if actor.clips_nothing:
        lines.append(
            f"actor.policy_loss=gspo: the clip range {actor.clip_range} is one of tokens and hardly ever acts on whole "
            "responses; actor.clip_ratio_low=null actor.clip_ratio_high=null sets GSPO's"
        )
    if actor.kl_gradient_vanishes:
        lines.append(
            f"actor.kl_loss_type={actor.kl_loss_type}: as a loss its gradient vanishes in expectation on policy, so "
            "the policy is not held to the reference; set it to k1+, k2, k3 or k3+, or set actor.use_unbiased_kl=true"
        )
    return lines


def check_steps(trainer: TrainerConfig, steps: int) -> None:
    """Raise ``ConfigError`` for options that a run of so many steps never gets to."""
    check_profile_steps(trainer.profile_steps, steps)
    if trainer.critic_warmup >= steps:
        raise ConfigError(
            f"trainer.critic_warmup={trainer.critic_warmup}: the run has {steps} steps, which leaves none to train the "
            "policy; lower it"
        )


def check_method_and_loss(config: PPOConfig, method: MethodCalls) -> None:
    """Raise ``ConfigError`` for a policy loss that cannot learn from a batch that the method composes."""
    needs = PolicyLoss(config.actor).needs
    if not method.overrides("learn_from"):
        return
    where = f"{method.where}: overrides learn_from, but actor.policy_loss={config.actor.policy_loss!r}"
    if needs.old_statistics:
        raise ConfigError(f"{where} compares with the policy that sampled; choose another loss or method")
    if needs.whole_groups:
        raise ConfigError(f"{where} needs all responses to a prompt; choose another loss or method")


def check_lengths(config: PPOConfig) -> None:
    """Raise ``ConfigError`` for sequences that are longer than a model was made for."""
    for prefix, model in config.models.items():
        field, length = "data.max_prompt_length+data.max_response_length", config.max_sequence_length
        if prefix == "reward_model.model":
            field, length = "reward_model.max_length", config.reward_model.max_length
        check_sequence_fits(field, length, f"{prefix}.path", model)


def check_models(config: PPOConfig, tokenizer: PreTrainedTokenizerBase, device_type: str) -> None:
    """Raise ``ConfigError`` for a model that could not be loaded as its options ask, or would read foreign tokens."""
    for prefix, model in config.models.items():
        check_model(model, prefix, device_type)
        judge = prefix == "reward_model.model"
        check_length(model, prefix, config.reward_model.max_length if judge else config.max_sequence_length)
    if config.calculator.enable:
        resolve_layers(config.calculator.layers, ModelInfo.of(config.model).num_layers)
    if config.uses_reward_model:
        check_value_architecture(config.reward_model.model, "reward_model.model.path")
    if config.uses_critic:
        check_value_architecture(config.critic.model, "critic.model.path")
    check_engine_model(config)
    end_tokens(config, tokenizer)  # raises for one that the model does not have
    check_embeds_tokens(config.model, "model.path", tokenizer)
    if config.uses_critic and config.critic.model.path != config.model.path:
        check_reads_tokens(config.critic.model, "critic.model.path", tokenizer)
