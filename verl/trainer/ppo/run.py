"""One run of the main job, from a checked config to ``summary.json``."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from verl.checkpoint.folders import latest_checkpoint, remove_unfinished
from verl.checkpoint.resume import (
    Resumption,
    best_validation,
    check_resumable,
    find_resumption,
    saved_validations,
    telling_how_to_go_on,
)
from verl.checkpoint.run_lock import locked
from verl.config.errors import ConfigError
from verl.config.ppo import PPOConfig
from verl.data.prompts import PromptDataset, train_loader, val_batches
from verl.data.reward_model_inputs import check_judgeable
from verl.models.checks import check_length, check_model, num_layers
from verl.models.fsdp import check_value_architecture
from verl.models.hidden_states import resolve_layers
from verl.models.info import check_sequence_fits
from verl.models.tokenizer import load_tokenizer
from verl.rank.calculator import RepresentationMetricsCalculator
from verl.rank.reward_manager import RewardManager
from verl.rewards import use_custom_functions
from verl.rewards.pool import VerifierPool
from verl.rollout import engine_environment
from verl.run.display import RunDisplay, share_rows
from verl.run.tracking import Tracker, write_summary
from verl.single_controller import WorkerGroup
from verl.single_controller.cluster import ray_cluster, resolve_device
from verl.trainer.logging.step_profiler import check_profile_steps
from verl.trainer.ppo.ray_trainer import BEST_BY, RayPPOTrainer
from verl.trainer.ppo.sampling import Sampler

COLUMNS = {
    "reward": ("score/mean", "+.2f"),
    "pass@1": ("train/pass@1", ".0%"),
    "val": ("val/pass@1", ".0%"),
    "ER": ("cal/overall/layer_1/Effective Rank/mean", ".2f"),
    "ERV": ("cal/overall/layer_1/Effective Rank diff/mean", "+.3f"),
    "ERA": ("cal/overall/layer_1/Effective Rank diff 2/mean", "+.3f"),
    "tok/s": ("perf/throughput", ".0f"),
}
"""What the progress bar shows: header -> (metric, format)."""


def run_ppo(config: PPOConfig) -> None:
    """Train. Everything that can be wrong with config and data is found before Ray starts.

    Raises:
        ConfigError: the config and the data or the machine do not fit.
        WorkerError: a worker raised or died.
    """
    device_type = resolve_device(config.device)
    use_custom_functions(config.reward_score.paths_of_custom_functions())
    tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
    data, pad_token_id, world_size = config.data, tokenizer.pad_token_id, config.trainer.world_size
    train_set = PromptDataset(data.train_files, tokenizer, data.max_prompt_length, data.truncation)
    loader = train_loader(train_set, data, pad_token_id, config.seed)
    held_out = []
    if data.val_files:
        val_set = PromptDataset(data.val_files, tokenizer, data.max_prompt_length, data.truncation)
        held_out = val_batches(val_set, data, pad_token_id, world_size, config.seed)
    reward_tokenizer = None
    if config.uses_reward_model:
        judge = config.reward_model.model
        reward_tokenizer = load_tokenizer(judge.path, judge.trust_remote_code, "reward_model.model.path")
        check_judgeable(
            [r.messages for r in train_set.records], reward_tokenizer, f"reward_model.model.path={judge.path!r}"
        )
    _check_lengths(config)
    _check_models(config, tokenizer, device_type)
    calculator = RepresentationMetricsCalculator(config.calculator) if config.calculator.enable else None
    steps = config.trainer.num_steps(len(loader))
    check_profile_steps(config.trainer.profile_steps, steps)
    if config.trainer.critic_warmup >= steps:
        raise ConfigError(
            f"trainer.critic_warmup={config.trainer.critic_warmup}: the run has {steps} steps, and none would be left "
            "to train the policy; lower it"
        )

    folder, trainer = Path(config.trainer.default_local_dir), config.trainer
    with ExitStack() as stack:
        stack.enter_context(locked(folder))
        stack.enter_context(telling_how_to_go_on(trainer))
        display = RunDisplay(trainer.experiment_name, steps, COLUMNS)
        if trainer.val_only and (folder / "summary.json").exists() and latest_checkpoint(folder) is None:
            display.say(f"the run is complete: {folder}/summary.json holds its validation")
            return
        resumption = find_resumption(config, trainer, display.say)
        if resumption is not None:
            _check_resumption(config, resumption, len(train_set))
            if resumption.step >= steps and not trainer.val_only:
                _say_complete(config, resumption, display)
                return
        last_step = None if resumption is None else resumption.step
        tracker = Tracker(folder, trainer.logger, trainer.project_name, trainer.experiment_name, config, last_step)
        stack.callback(tracker.close)
        display.say(f"{trainer.experiment_name}: {steps} steps on {world_size} {device_type} workers, into {folder}")
        # Once Ray has ended, with the workers that may still have been writing.
        stack.callback(remove_unfinished, folder)
        stack.enter_context(ray_cluster(world_size, device_type))
        verifiers = stack.enter_context(VerifierPool(config.reward_score))
        workers = WorkerGroup(
            "verl.workers.hybrid:HybridWorker",
            config,
            (steps,),
            trainer.nnodes,
            trainer.n_gpus_per_node,
            device_type,
            engine_environment(device_type, config.rollout.name),
        )
        stack.callback(workers.close)
        stack.enter_context(display)
        sampler = Sampler(config, tokenizer, reward_tokenizer, workers, verifiers)
        ppo = RayPPOTrainer(config, loader, held_out, workers, sampler, calculator, tracker, display)
        if resumption is not None:
            ppo.restore(resumption)
        ppo.fit()
        tracker.summarize(_summary(config, ppo.step, ppo.validations, ppo.timer.totals))
    _report(display, ppo, folder)


def _check_lengths(config: PPOConfig) -> None:
    """Raise ``ConfigError`` for sequences that are longer than a model was made for."""
    field, length = "data.max_prompt_length+data.max_response_length", config.max_sequence_length
    check_sequence_fits(field, length, "model.path", config.model.path, config.model.trust_remote_code)
    if config.uses_critic:
        critic = config.critic.model
        check_sequence_fits(field, length, "critic.model.path", critic.path, critic.trust_remote_code)
    if config.uses_reward_model:
        judge, limit = config.reward_model.model, config.reward_model.max_length
        name = "reward_model.max_length"
        check_sequence_fits(name, limit, "reward_model.model.path", judge.path, judge.trust_remote_code)


def _check_resumption(config: PPOConfig, resumption: Resumption, num_prompts: int) -> None:
    """Raise ``ConfigError`` for a checkpoint that does not fit the run."""
    parts = {"actor": config.model} | ({"critic": config.critic.model} if config.uses_critic else {})
    check_resumable(resumption, "ppo", num_prompts, parts)
    shuffle, trainer = config.data.shuffle, config.trainer
    if resumption.state["shuffle"] != shuffle:
        raise ConfigError(
            f"data.shuffle={shuffle}: was {not shuffle} when {resumption.folder} was written, and its place in "
            "that order would be lost; set it back, or start a new run from the model it holds"
        )
    if trainer.val_only and resumption.folder.parent == Path(trainer.default_local_dir):
        raise ConfigError(
            f"trainer.val_only=True: {trainer.default_local_dir} holds a training run; name another folder and the "
            "checkpoint, by trainer.resume_mode=path"
        )
    try:
        RewardManager(config.reward_manager).load_state_dict(resumption.state["reward_manager"])
    except ValueError as error:
        raise ConfigError(f"{resumption.folder}: {error}") from error


def _say_complete(config: PPOConfig, resumption: Resumption, display: RunDisplay) -> None:
    """The run was at its end already; it may have been stopped before its summary was written."""
    folder = Path(config.trainer.default_local_dir)
    if not (folder / "summary.json").exists():
        validations = saved_validations(resumption.state)
        summary = _summary(config, resumption.step, validations, resumption.state["seconds_by_phase"])
        write_summary(folder, summary)
    display.say(
        f"the run is complete: step {resumption.step} was its last; raise trainer.total_training_steps to go on"
    )


def _check_models(config: PPOConfig, tokenizer: PreTrainedTokenizerBase, device_type: str) -> None:
    """Raise ``ConfigError`` for a model that could not be loaded as its options ask, or would read foreign tokens."""
    try:
        for prefix, model in config.models.items():
            check_model(model, prefix, device_type)
            judge = prefix == "reward_model.model"
            check_length(model, prefix, config.reward_model.max_length if judge else config.max_sequence_length)
        if config.calculator.enable:
            resolve_layers(config.calculator.layers, num_layers(config.model))
        if config.uses_reward_model:
            check_value_architecture(config.reward_model.model, "reward_model.model.path")
        if config.uses_critic:
            check_value_architecture(config.critic.model, "critic.model.path")
    except ValueError as error:
        raise ConfigError(str(error)) from error
    path = config.critic.model.path
    if config.uses_critic and path != config.model.path:
        own = load_tokenizer(path, config.critic.model.trust_remote_code, "critic.model.path")
        if own.get_vocab() != tokenizer.get_vocab():
            raise ConfigError(
                f"critic.model.path={path!r}: its tokenizer is not that of model.path={config.model.path!r}, whose "
                "tokens it would read; name a relative of the policy"
            )


def _summary(
    config: PPOConfig, step: int, validations: Mapping[int, dict[str, float]], seconds_by_phase: Mapping[str, float]
) -> dict[str, object]:
    return {
        "steps": step,
        "seed": config.seed,
        "before": validations.get(0, {}),
        "after": dict(validations[max(validations)]) if validations else {},
        "best": best_validation(validations, BEST_BY),
        "seconds_by_phase": seconds_by_phase,
    }


def _report(display: RunDisplay, ppo: RayPPOTrainer, folder: Path) -> None:
    if len(ppo.validations) > 1:
        (first, before), *_, (last, after) = ppo.validations.items()
        names = {
            "pass@1": ("val/pass@1", ".1%"),
            "response length": ("val/response_length/mean", ".1f"),
            "Effective Rank": ("val/cal/overall/layer_1/Effective Rank/mean", ".3f"),
            "velocity (ERV)": ("val/cal/overall/layer_1/Effective Rank diff/mean", "+.4f"),
            "acceleration (ERA)": ("val/cal/overall/layer_1/Effective Rank diff 2/mean", "+.4f"),
        }
        rows = [
            [label, format(before[name], form), format(after[name], form)]
            for label, (name, form) in names.items()
            if name in before and name in after
        ]
        display.table("Validation", ["", f"step {first}", f"step {last}"], rows)
    display.table("Time by phase", ["phase", "seconds", "share"], share_rows(ppo.timer.totals))
    if ppo.step:
        model = "/actor/huggingface" if ppo.config.trainer.save_hf_model else ""
        display.say(f"model: {folder}/global_step_{ppo.step}{model}")
    display.say(f"metrics: {folder}/metrics.jsonl")
