"""What a run is made from, loaded and checked before Ray starts."""

from dataclasses import dataclass

from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import PreTrainedTokenizerBase

from verl.config.ppo import PPOConfig
from verl.data.prompt_rows import PromptRecord
from verl.data.prompts import PromptDataset, train_loader, val_batches
from verl.data.templates import stop_strings
from verl.method.calls import MethodCalls
from verl.models.hub import fetch_models
from verl.models.info import ModelInfo
from verl.models.reward_model_inputs import check_reward_model_template
from verl.models.tokenizer import load_tokenizer
from verl.rank.calculator import RepresentationMetricsCalculator
from verl.rank.reward_manager import RewardManager
from verl.rank.token_metrics import check_token_metrics
from verl.rewards import use_custom_functions
from verl.run.sinks import check_trackers
from verl.single_controller.cluster import resolve_device
from verl.trainer.ppo.advantages import AdvantageEstimation
from verl.trainer.ppo.checks import (
    check_lengths,
    check_method_and_loss,
    check_models,
    check_steps,
    start_warnings,
)
from verl.utils.user_code import kl_estimator
from verl.workers.policy_loss import check_policy_loss


@dataclass(frozen=True)
class RunInputs:
    """Data, tokenizers and the user's code of a run."""

    config: PPOConfig
    device_type: str
    tokenizer: PreTrainedTokenizerBase
    reward_tokenizer: PreTrainedTokenizerBase | None
    """The reward model's; None without one."""
    train_set: PromptDataset
    held_out: list[list[PromptRecord]]
    """The validation prompts, in batches."""
    calculator: RepresentationMetricsCalculator | None
    """None without rank metrics."""
    method: MethodCalls
    """In its first state; :meth:`new_method` makes that of an attempt."""
    steps_per_epoch: int
    steps: int
    """Of the whole run."""
    warnings: list[str]

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


def load_inputs(config: PPOConfig) -> RunInputs:
    """Load and check what a run is made from.

    Raises:
        ConfigError: the config does not fit the data or the machine, or code that it names cannot be used.
    """
    check_trackers(config.trainer.logger)
    device_type = resolve_device(config.device, *config.trainer.place)
    use_custom_functions(config.reward_score.paths_of_custom_functions(), config.reward_score.custom_kwargs)
    tokenizer = _load_models(config)
    data, trainer = config.data, config.trainer
    train_set = PromptDataset(data.train_files, tokenizer, data, data.train_max_samples, config.seed)
    # How many steps there are depends on how many candidates the method asks for.
    candidates = MethodCalls(config, tokenizer, train_set.records).candidates_per_prompt
    per_epoch = len(train_loader(train_set, data, config.seed, candidates))
    notes, held_out = {"training": train_set.notes}, []
    if data.val_files:
        val_set = PromptDataset(data.val_files, tokenizer, data)
        notes["validation"] = val_set.notes
        held_out = val_batches(val_set, data, config.seed)
    reward_tokenizer = _load_reward_tokenizer(config, train_set) if config.uses_reward_model else None
    check_policy_loss(config)
    check_lengths(config)
    check_models(config, tokenizer, device_type)
    calculator = RepresentationMetricsCalculator(config.calculator) if config.calculator.enable else None
    _check_functions(config)
    steps = trainer.num_steps(per_epoch)
    check_steps(trainer, steps)
    method = MethodCalls(config, tokenizer, train_set.records, steps)
    check_method_and_loss(config, method)
    notes["training"].extend([method.note] if method.note else [])
    warnings = [f"{kind}: {line}" for kind, lines in notes.items() for line in lines] + start_warnings(config, method)
    return RunInputs(
        config=config,
        device_type=device_type,
        tokenizer=tokenizer,
        reward_tokenizer=reward_tokenizer,
        train_set=train_set,
        held_out=held_out,
        calculator=calculator,
        method=method,
        steps_per_epoch=per_epoch,
        steps=steps,
        warnings=warnings,
    )


def _load_models(config: PPOConfig) -> PreTrainedTokenizerBase:
    """Fetch the models, and load the policy's tokenizer."""
    fetch_models(config.models)
    for model in config.models.values():
        ModelInfo.of(model)  # before its tokenizer, which reads config.json too
    return load_tokenizer(config.model.path, config.model.trust_remote_code, needs_chat_template=False)


def _load_reward_tokenizer(config: PPOConfig, train_set: PromptDataset) -> PreTrainedTokenizerBase:
    judge = config.reward_model.model
    tokenizer = load_tokenizer(judge.path, judge.trust_remote_code, "reward_model.model.path")
    chats = [record.messages for record in train_set.records]
    check_reward_model_template(chats, tokenizer, f"reward_model.model.path={judge.path!r}")
    return tokenizer


def _check_functions(config: PPOConfig) -> None:
    """Raise ``ConfigError`` for functions of the user's that cannot be loaded or called."""
    AdvantageEstimation(config, RewardManager(config.reward_manager))
    check_token_metrics(config.calculator.token_metrics)
    kl_estimator(config.actor.kl_loss_type, "actor.kl_loss_type", config.actor.kl_loss_type_kwargs)
