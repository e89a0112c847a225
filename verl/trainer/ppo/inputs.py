"""What a run is made from, loaded and checked before Ray starts."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import PreTrainedTokenizerBase

from verl.config.checks import require
from verl.config.errors import ConfigError, Mistakes
from verl.config.ppo import PPOConfig
from verl.config.rewards import RewardScoreConfig
from verl.data.prompt_rows import PromptRecord
from verl.data.prompts import PromptDataset, train_loader, val_batches
from verl.data.templates import check_template, find_template, stop_strings
from verl.method.calls import MethodCalls
from verl.models.checks import check_length, check_model, check_sequence_fits, check_value_architecture
from verl.models.hub import fetch_model
from verl.models.info import ModelInfo, override_notes, resolve_layers
from verl.models.tokenizer import check_embeds_tokens, check_reads_tokens, check_reward_model_template, load_tokenizer
from verl.rank.calculator import RepresentationMetricsCalculator
from verl.rank.reward_manager import RewardManager
from verl.rank.token_metrics import check_token_metrics
from verl.rewards import use_custom_functions
from verl.rewards.pool import VerifierPool
from verl.rewards.registry import rewards_boxes
from verl.rollout import check_engine_model, end_tokens
from verl.rollout.conversations import ConversationSetup, check_conversations
from verl.rollout.environments import EnvironmentPool
from verl.rollout.tools import tool_schemas
from verl.run.sinks import check_trackers
from verl.single_controller.cluster import resolve_device
from verl.trainer.logging.speed import check_profile_steps
from verl.trainer.ppo.advantages import AdvantageEstimation
from verl.utils.user_code import kl_estimator
from verl.workers.policy_loss import PolicyLoss, check_policy_loss

TRIED_PROMPTS = 16
"""Prompts of each data source whose form is looked at before the start."""


class RunInputs:
    """Data, tokenizers and the user's code of a run.

    Raises:
        ConfigError: the config does not fit the data or the machine, or code that it names cannot be used.
    """

    def __init__(self, config: PPOConfig) -> None:
        data, trainer, rewards = config.data, config.trainer, config.reward_score
        check_trackers(trainer.logger)
        self.config = config
        self.device_type = resolve_device(config.device, *trainer.place)
        use_custom_functions(rewards.paths_of_custom_functions(), rewards.custom_kwargs)
        for prefix, model in config.models.items():
            fetch_model(model.path, f"{prefix}.path")
        for model in config.models.values():
            ModelInfo.of(model)  # before its tokenizer, which reads config.json too
        policy = config.model
        self.tokenizer = load_tokenizer(policy.path, policy.trust_remote_code, needs_chat_template=False)
        check_template(data.template, self.tokenizer, "data.template")
        fix = "the answer is what a program returns, which evaluations alone run; set it to another"
        require(find_template(data.template).python != "solution", "data.template", data.template, fix)
        data = replace(data, apply_chat_template_kwargs=self.chat_arguments)
        mistakes = Mistakes()
        with mistakes.collected():
            arguments = config.data.apply_chat_template_kwargs
            check_conversations(config.rollout.multi_turn, self.tokenizer, data.template, arguments)
        with mistakes.collected():
            self.train_set = PromptDataset(data.train_files, self.tokenizer, data, data.train_max_samples, config.seed)
        with mistakes.collected():
            val_set = PromptDataset(data.val_files, self.tokenizer, data) if data.val_files else None
        self.reward_tokenizer = self._reward_tokenizer() if config.uses_reward_model and not mistakes.lines else None
        """The reward model's; None without one."""
        with mistakes.collected():
            check_policy_loss(config)
        with mistakes.collected():
            check_models(config, self.tokenizer, self.device_type)
        mistakes.raise_all()
        # How many steps there are depends on how many candidates the method asks for.
        self.steps = 0
        self.method = self.new_method()
        self.steps_per_epoch = len(self.new_loader())
        notes = [f"training: {line}" for line in self.train_set.notes]
        self.held_out: list[list[PromptRecord]] = []
        """The validation prompts, in batches."""
        if val_set is not None:
            notes += [f"validation: {line}" for line in val_set.notes]
            self.held_out = val_batches(val_set, data, config.seed)
        held_out = [record for batch in self.held_out for record in batch]
        notes += try_reward_functions(rewards, [*self.train_set.records, *held_out])
        notes += form_warnings(rewards.mode, self.train_set.records, self.tokenizer)
        self.calculator = RepresentationMetricsCalculator(config.calculator) if config.calculator.enable else None
        """None without rank metrics."""
        AdvantageEstimation(config, RewardManager(config.reward_manager))  # raises for functions that cannot be used
        check_token_metrics(config.calculator.token_metrics)
        kl_estimator(config.actor.kl_loss_type, "actor.kl_loss_type", config.actor.kl_loss_type_kwargs)
        self.steps = trainer.num_steps(self.steps_per_epoch)
        """Of the whole run."""
        check_profile_steps(trainer.profile_steps, self.steps)
        if trainer.critic_warmup >= self.steps:
            raise ConfigError(
                f"trainer.critic_warmup={trainer.critic_warmup}: the run has {self.steps} steps, which leaves none to "
                "train the policy; lower it"
            )
        self.method = self.new_method()
        """In its first state."""
        check_method_and_loss(config, self.method)
        notes += [f"training: {self.method.note}"] if self.method.note else []
        notes += override_notes(policy)
        self.warnings = notes + start_warnings(config, self.method)

    @property
    def chat_arguments(self) -> dict[str, Any]:
        """Arguments of the chat template: those of the data, and the schemas of the tools."""
        options, arguments = self.config.rollout.multi_turn, self.config.data.apply_chat_template_kwargs
        return arguments | {"tools": tool_schemas(options)} if options.calls_tools else arguments

    def conversations(self, pool: EnvironmentPool) -> ConversationSetup:
        """How responses have several turns, with environments in ``pool``."""
        options, limit = self.config.rollout.multi_turn, self.config.data.max_response_length
        template = self.config.data.template
        return ConversationSetup(options, limit, self.tokenizer, self.chat_arguments, self.stop_strings, pool, template)

    @property
    def stop_strings(self) -> list[str]:
        """Strings that end a response."""
        return [*self.config.rollout.stop, *stop_strings(self.config.data.template, self.tokenizer)]

    def new_method(self) -> MethodCalls:
        """The method, for an attempt: one that failed leaves no state behind."""
        return MethodCalls(self.config, self.tokenizer, self.train_set.records, self.steps)

    def new_loader(self) -> StatefulDataLoader:
        """Batches of training prompts from the first on."""
        config, candidates = self.config, self.method.candidates_per_prompt
        return train_loader(self.train_set, config.data, config.seed, candidates)

    def _reward_tokenizer(self) -> PreTrainedTokenizerBase:
        judge = self.config.reward_model.model
        tokenizer = load_tokenizer(judge.path, judge.trust_remote_code, "reward_model.model.path")
        chats = [record.messages for record in self.train_set.records]
        check_reward_model_template(chats, tokenizer, f"reward_model.model.path={judge.path!r}")
        return tokenizer


def try_reward_functions(config: RewardScoreConfig, records: Sequence[PromptRecord]) -> list[str]:
    """Call the custom function of each data source on its first record, as training will: with an empty response, and
    with the ground truth. Returns a warning for each call that exceeded the limits.

    Raises:
        ConfigError: a function raised or returned no score, or no record has its data source.
    """
    custom = config.paths_of_custom_functions()
    if not custom:
        return []
    firsts: dict[str, PromptRecord] = {}
    for record in records:
        firsts.setdefault(record.data_source, record)
    if unused := sorted(custom.keys() - firsts.keys() - {"*"}):
        entry = f"{unused[0]}={custom[unused[0]]}"
        raise ConfigError(
            f"reward_score.custom_functions={entry!r}: no prompt has the data_source {unused[0]!r}; the data have "
            f"{', '.join(sorted(firsts)):.500}"
        )
    scored = [record for source, record in firsts.items() if source in custom or "*" in custom]
    tries = [(record, text) for record in scored for text in ("", str(record.ground_truth))]
    with VerifierPool(replace(config, num_workers=1)) as verifiers:
        verdicts = verifiers.score_batch(
            [record.data_source for record, _ in tries],
            [text for _, text in tries],
            [record.ground_truth for record, _ in tries],
            [record.extra_info for record, _ in tries],
        )
    return [
        f"reward_score.custom_functions: the function of data_source={record.data_source!r} scored the response "
        f"{text!r:.100} 0 for {verdict['reason']}, tried on the first record"
        for (record, text), verdict in zip(tries, verdicts, strict=True)
        if verdict["reason"] not in ("custom", "error")
    ]


def form_warnings(mode: str, records: Sequence[PromptRecord], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """A line for each data source whose first prompts ask for no form of the answer that ``reward_score.mode`` rewards.

    Custom functions and verifiers of other forms than a box are left out.
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
    lines += few_prefixes(config)
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


def few_prefixes(config: PPOConfig) -> list[str]:
    """A line if even the longest response has too few prefixes for an acceleration, which is then 0."""
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


def check_models(config: PPOConfig, tokenizer: PreTrainedTokenizerBase, device_type: str) -> None:
    """Raise ``ConfigError`` for a model that could not be loaded as its options ask, or would read foreign tokens, or
    sequences that are longer than it was made for."""
    for prefix, model in config.models.items():
        field, longest = "data.max_prompt_length+data.max_response_length", config.max_sequence_length
        if prefix == "reward_model.model":
            field, longest = "reward_model.max_length", config.reward_model.max_length
        check_sequence_fits(field, longest, f"{prefix}.path", model)
        check_model(model, prefix, device_type)
        check_length(model, prefix, longest)
    if config.calculator.enable:
        resolve_layers(config.calculator.layers, ModelInfo.of(config.model).num_layers)
    if config.uses_reward_model:
        check_value_architecture(config.reward_model.model, "reward_model.model.path")
    if config.uses_critic:
        check_value_architecture(config.critic.model, "critic.model.path")
    check_engine_model(config, device_type)
    end_tokens(config, tokenizer)  # raises for one that the model does not have
    check_embeds_tokens(config.model, "model.path", tokenizer)
    if config.uses_critic and config.critic.model.path != config.model.path:
        check_reads_tokens(config.critic.model, "critic.model.path", tokenizer)
