"""One run of the main job, from a checked config to ``summary.json``."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from verl.checkpoint.folders import latest_checkpoint
from verl.checkpoint.resume import Resumption, best_validation, changed_options, saved_validations
from verl.config.errors import ConfigError
from verl.config.ppo import PPOConfig
from verl.config.trainer import TrainerConfig
from verl.data.prompts import PromptDataset, train_loader, val_batches
from verl.data.templates import stop_strings
from verl.models.hidden_states import resolve_layers
from verl.models.hub import fetch_models
from verl.models.info import ModelInfo, check_length, check_sequence_fits
from verl.models.loading import check_model
from verl.models.reward_model_inputs import check_reward_model_template
from verl.models.tokenizer import check_embeds_tokens, check_reads_tokens, load_tokenizer
from verl.models.value_models import check_value_architecture
from verl.rank.calculator import RepresentationMetricsCalculator
from verl.rank.reward_manager import RewardManager
from verl.rewards import use_custom_functions
from verl.rewards.pool import VerifierPool
from verl.rollout import check_engine_model, end_tokens, engine_environment
from verl.run.display import RunDisplay
from verl.run.samples import SampleStore
from verl.run.session import TrainingRun
from verl.run.sinks import check_trackers
from verl.single_controller.cluster import resolve_device
from verl.trainer.logging.source_metrics import logged_sources
from verl.trainer.logging.step_profiler import check_profile_steps
from verl.trainer.ppo.estimation import SignalEstimation, check_own_code
from verl.trainer.ppo.hooks import SamplingHooks
from verl.trainer.ppo.ray_trainer import BEST_BY, RayPPOTrainer
from verl.trainer.ppo.samples import SampleKeeper
from verl.trainer.ppo.sampling import Sampler
from verl.workers.policy_loss import check_policy_loss

COLUMNS = {
    "reward": ("score/mean", "+.2f"),
    "pass@1": ("train/pass@1", ".0%"),
    "val": ("val/pass@1", ".0%"),
    "ER": ("cal/overall/layer_1/Effective Rank/mean", ".2f"),
    "ERV": ("cal/overall/layer_1/Effective Rank diff/mean", "+.3f"),
    "ERA": ("cal/overall/layer_1/Effective Rank diff 2/mean", "+.3f"),
    "tok/s": ("perf/throughput", ".0f"),
}


def run_ppo(config: PPOConfig) -> None:
    """Train. Everything that can be wrong with config and data is found before Ray starts.

    Raises:
        ConfigError: the config does not fit the data or the machine.
        WorkerError: a worker raised or died.
    """
    check_trackers(config.trainer.logger)
    device_type = resolve_device(config.device, *config.trainer.place)
    use_custom_functions(config.reward_score.paths_of_custom_functions(), config.reward_score.custom_kwargs)
    fetch_models(config.models)
    for model in config.models.values():
        ModelInfo.of(model)  # before its tokenizer, which reads config.json too
    tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code, needs_chat_template=False)
    data, trainer, pad_token_id = config.data, config.trainer, tokenizer.pad_token_id
    train_set = PromptDataset(data.train_files, tokenizer, data, data.train_max_samples, config.seed)
    loader = train_loader(train_set, data, pad_token_id, config.seed)
    notes = {"training": train_set.notes}
    held_out = []
    if data.val_files:
        val_set = PromptDataset(data.val_files, tokenizer, data)
        notes["validation"] = val_set.notes
        held_out = val_batches(val_set, data, pad_token_id, config.seed)
    reward_tokenizer = None
    if config.uses_reward_model:
        judge = config.reward_model.model
        reward_tokenizer = load_tokenizer(judge.path, judge.trust_remote_code, "reward_model.model.path")
        check_reward_model_template(
            [r.messages for r in train_set.records], reward_tokenizer, f"reward_model.model.path={judge.path!r}"
        )
    check_policy_loss(config)
    _check_lengths(config)
    _check_models(config, tokenizer, device_type)
    calculator = RepresentationMetricsCalculator(config.calculator) if config.calculator.enable else None
    steps = trainer.num_steps(len(loader))
    check_own_code(config, steps)
    _check_steps(trainer, steps)
    # What is wrong with the user's classes is told now.
    notes["training"].extend(SamplingHooks(config, steps, train_set.records, tokenizer).notes)

    run = TrainingRun(config, steps, COLUMNS, device_type)
    with run:
        if trainer.val_only and (run.folder / "summary.json").exists() and latest_checkpoint(run.folder) is None:
            changed = changed_options(run.folder / "config.yaml", asdict(config))
            if changed:
                field = f"trainer.default_local_dir={trainer.default_local_dir!r}"
                raise ConfigError(f"{field}: holds a run with other options ({changed[0]}); name another folder")
            run.display.say(f"the run is complete: {run.folder}/summary.json holds its validation")
            return
        parts = {"actor": config.model} | ({"critic": config.critic.model} if config.uses_critic else {})
        resumption = run.find_resumption("ppo", len(train_set), parts)
        if resumption is not None:
            _check_resumption(config, resumption)
            if run.is_complete(resumption) and not trainer.val_only:
                state = resumption.state
                summary = _summary(config, resumption.step, saved_validations(state), state["seconds_by_phase"])
                run.report_complete(resumption, summary)
                return
        first = tokenizer.decode(train_set[0].input_ids)
        run.display.say(f"the first of {len(train_set)} training prompts: {first!r:.500}")
        told = [f"{kind}: {line}" for kind, lines in notes.items() for line in lines]
        for line in [*told, *start_warnings(config)]:
            run.display.say(f"warning: {line}")
        run.display.say(trainer.length_note(len(loader)))
        environment = engine_environment(device_type, config.rollout.name)
        strings = [*config.rollout.stop, *stop_strings(config.data.template, tokenizer)]
        sources = logged_sources(record.data_source for record in train_set.records)

        def train() -> RayPPOTrainer:
            verifiers = run.resources.enter_context(VerifierPool(config.reward_score, run.busy_cores))
            tracker, workers = run.start("verl.workers.hybrid:HybridWorker", (steps, strings), environment)
            hooks = SamplingHooks(config, steps, train_set.records, tokenizer)
            sampler = Sampler(config, tokenizer, reward_tokenizer, workers, verifiers, strings, sources, hooks)
            prompts = train_loader(train_set, data, pad_token_id, config.seed)
            store = run.resources.enter_context(SampleStore(run.folder, trainer.samples, run.attempt, run.display.say))
            samples = SampleKeeper(store, trainer.log_samples, tokenizer, tracker, run.display)
            ppo = RayPPOTrainer(config, prompts, held_out, workers, sampler, calculator, tracker, samples, run)
            if run.resumption is not None:
                ppo.restore(run.resumption)
            ppo.fit()
            return ppo

        ppo = run.attempts(train)
        run.write_summary(_summary(config, ppo.step, ppo.validations, ppo.timer.totals))
    _show_validations(run.display, ppo.validations)
    run.report(ppo.timer.totals)


def start_warnings(config: PPOConfig) -> list[str]:
    """What is allowed, but hardly meant."""
    lines, actor = [], config.actor
    if config.compares_nothing:
        lines.append(
            f"rollout.n=1: {config.algorithm.adv_estimator} compares the responses to a prompt; with one of them the "
            "advantage is its reward, without a baseline; set rollout.n>=2"
        )
    if config.rollout.schedule is not None and actor.tis_level == "none" and not actor.bypass_mode:
        lines.append(
            f"rollout.schedule={config.rollout.schedule}: responses are sampled from other distributions than that "
            "at rollout.temperature, which is learned; set actor.tis_level=token, which weights them"
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


def _check_steps(trainer: TrainerConfig, steps: int) -> None:
    """Raise ``ConfigError`` for options that a run of so many steps never gets to."""
    check_profile_steps(trainer.profile_steps, steps)
    if trainer.critic_warmup >= steps:
        raise ConfigError(
            f"trainer.critic_warmup={trainer.critic_warmup}: the run has {steps} steps, which leaves none to train the "
            "policy; lower it"
        )


def _check_lengths(config: PPOConfig) -> None:
    """Raise ``ConfigError`` for sequences that are longer than a model was made for."""
    for prefix, model in config.models.items():
        field, length = "data.max_prompt_length+data.max_response_length", config.max_sequence_length
        if prefix == "reward_model.model":
            field, length = "reward_model.max_length", config.reward_model.max_length
        check_sequence_fits(field, length, f"{prefix}.path", model)


def _check_resumption(config: PPOConfig, resumption: Resumption) -> None:
    """Raise ``ConfigError`` if the checkpoint does not fit the options of this job."""
    shuffle, trainer = config.data.shuffle, config.trainer
    if resumption.state["shuffle"] != shuffle:
        raise ConfigError(
            f"data.shuffle={shuffle}: was {not shuffle} when {resumption.folder} was written, so the position in the "
            "data would be lost; set it back, or start a new run from the model it holds"
        )
    # Checkpoints of earlier versions have no other order.
    before, now = resumption.state.get("order", ""), config.data.order
    if before != now:
        raise ConfigError(
            f"{now or before.partition('=')[0]}: {resumption.folder} was written with {before or 'neither'}, so the "
            "position in the data would be lost; set it back, or start a new run from the model it holds"
        )
    if trainer.val_only and resumption.folder.parent == Path(trainer.default_local_dir):
        raise ConfigError(
            f"trainer.val_only=True: {trainer.default_local_dir} holds a training run; name another folder, and the "
            "checkpoint with trainer.resume_mode=path"
        )
    SignalEstimation(config, 1).load_state(resumption.state.get("signal", {}))
    try:
        RewardManager(config.reward_manager).load_state_dict(resumption.state["reward_manager"])
    except ValueError as error:
        raise ConfigError(f"{resumption.folder}: {error}") from error


def _check_models(config: PPOConfig, tokenizer: PreTrainedTokenizerBase, device_type: str) -> None:
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


def _summary(
    config: PPOConfig, step: int, validations: Mapping[int, dict[str, float]], seconds_by_phase: Mapping[str, float]
) -> dict[str, object]:
    return {
        "steps": step,
        "seed": config.seed,
        "before": validations.get(0, {}),
        "after": validations.get(step, {}),
        "best": best_validation(validations, BEST_BY),
        "seconds_by_phase": seconds_by_phase,
    }


def _show_validations(display: RunDisplay, validations: Mapping[int, Mapping[str, float]]) -> None:
    """Compare the first and the last validation, if there are two."""
    if len(validations) < 2:
        return
    (first, before), *_, (last, after) = validations.items()
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
