"""Warns, before a run starts, about options and prompts that are valid but probably a mistake."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from verl.config.ppo import PPOConfig
from verl.data.prompt_record import PromptRecord
from verl.method.calls import MethodCalls
from verl.rewards.registry import rewards_boxes

TRIED_PROMPTS = 16
"""Number of prompts per data source that :func:`form_warnings` checks."""


def form_warnings(mode: str, records: Sequence[PromptRecord], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return a warning for each data source whose first prompts do not ask for the rewarded answer format.

    Data sources are skipped if they have custom functions or if their verifiers do not expect boxed answers.
    """
    firsts: dict[str, list[PromptRecord]] = {}
    for record in records if mode == "independent" else ():
        firsts.setdefault(record.data_source, []).append(record)
    lines = []
    for source, rows in firsts.items():
        if not rewards_boxes(source):
            continue
        texts = [tokenizer.decode(row.input_ids) for row in rows[:TRIED_PROMPTS]]
        bare = [text for text, row in zip(texts, rows, strict=False) if "boxed" not in text and not row.asks_for_hashes]
        if bare:
            asked = "ask for <answer> ... </answer>" if "<answer>" in bare[0] else "ask for no form of the answer"
            lines.append(
                f"reward_score.mode='independent': {len(bare)} of the first {len(texts)} prompts of "
                f"data_source={source!r} {asked}, and a right answer scores 1 in \\boxed{{}} and 0.5 without; let the "
                "prompts ask for a box (data.template=qwen-boxed does), or set reward_score.mode=mix"
            )
    return lines


def start_warnings(config: PPOConfig, method: MethodCalls) -> list[str]:
    """Return warnings for options that are valid but probably a mistake."""
    lines, actor, weights = [], config.actor, config.algorithm.rollout_correction.rollout_is
    if config.compares_nothing:
        lines.append(
            f"rollout.n=1: {config.algorithm.adv_estimator} compares the responses to a prompt; with one of them the "
            "advantage is its reward, without a baseline; set rollout.n>=2"
        )
    if method.overrides("sampling") and weights is None and not actor.bypass_mode:
        lines.append(
            f"{method.where}: overrides sampling, so responses come from other distributions than that at "
            "rollout.temperature, which is learned; set algorithm.rollout_correction.rollout_is=token to weight them"
        )
    lines += prefix_warnings(config)
    num_updates, staleness = config.actor_updates(1), config.async_training.max_staleness
    if staleness > 0 and num_updates > 1:
        lines.append(
            f"async_training.max_staleness={staleness}: a step makes {num_updates} updates of the policy "
            f"(actor.ppo_mini_batch_size={actor.ppo_mini_batch_size}, actor.ppo_epochs={actor.ppo_epochs}), so its "
            f"last learns from tokens that are up to {staleness * num_updates + num_updates - 1} updates old; set "
            f"actor.ppo_mini_batch_size={config.data.train_batch_size} and actor.ppo_epochs=1, or watch "
            "async/lag_<k>/kl"
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


def start_notes(config: PPOConfig) -> list[str]:
    """Return notes on an incomplete last mini-batch, training with a critic, and the judge."""
    batch, size = config.data.train_batch_size, config.actor.ppo_mini_batch_size
    notes = []
    if batch % size:
        notes.append(
            f"actor.ppo_mini_batch_size={size}: does not divide data.train_batch_size={batch}; the last update of each "
            f"step learns from {batch % size} prompts alone"
        )
    if config.uses_critic:
        notes.append(
            f"algorithm.adv_estimator={config.algorithm.adv_estimator}: trains a critic beside the policy, from "
            f"critic.model.path={config.critic.model.path}; algorithm.adv_estimator=grpo needs none"
        )
    judge = config.reward_score.judge
    if judge.enable:
        what = "compares the responses to each prompt" if judge.pairs else "scores responses"
        sources = f" to {', '.join(judge.data_sources)}" if judge.data_sources else ""
        notes.append(f"judge: {judge.description}, {what}{sources}, with weight {judge.weight:g}")
    return notes


def prefix_warnings(config: PPOConfig) -> list[str]:
    """Return a warning if even the longest response has too few prefixes for a nonzero acceleration."""
    calculator, longest = config.calculator, config.data.max_response_length
    if not (calculator.enable and calculator.compute_diff):
        return []
    whole = calculator.prefix_rule != "after_stride"
    count, stride = (longest - 1) // calculator.diff_stride + whole, calculator.diff_stride
    if count >= 3:
        return []
    zero = "acceleration (ERA) is" if count == 2 else "velocity (ERV) and acceleration (ERA) are"
    return [
        f"calculator.diff_stride={stride}: even a response of data.max_response_length={longest} tokens has {count} "
        f"prefix{'es' * (count != 1)}, so {zero} 0; set calculator.diff_stride={max(1, (longest - 1) // 8)} or less"
    ]
