"""Runs a PPO training job from a validated config and writes ``summary.json``."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from verl.checkpoint.digests import data_by_file, run_digests
from verl.checkpoint.folders import latest_checkpoint
from verl.checkpoint.resume import Resumption, best_validation, changed_options, saved_validations
from verl.config.errors import ConfigError
from verl.config.ppo import PPOConfig
from verl.config.rollout import SamplingConfig
from verl.rank.reward_manager import RewardManager
from verl.rewards.pool import VerifierPool
from verl.rollout.engines import engine_environment
from verl.rollout.environments.pool import ENVIRONMENT_LOG
from verl.rollout.multi_turn import conversation_pool
from verl.run.display import RunDisplay
from verl.run.samples import SampleStore
from verl.run.session import TrainingRun
from verl.run.setup import TrainingSetup
from verl.run.warnings import start_notes
from verl.single_controller.pooled_policy import PooledPolicyWorkers
from verl.single_controller.roles import PolicyWorkers
from verl.trainer.logging.rollout_metrics import logged_sources
from verl.trainer.ppo.advantages import AdvantageEstimation, ResponseRewards
from verl.trainer.ppo.judging import Judging
from verl.trainer.ppo.partial_rollouts import PartialRolloutScheduler
from verl.trainer.ppo.ray_trainer import BEST_BY, RayPPOTrainer, prompt_order
from verl.trainer.ppo.rollout_scheduler import RolloutScheduler
from verl.trainer.ppo.samples import SampleLogger
from verl.trainer.ppo.weight_check import check_weights

COLUMNS = {
    "reward": ("critic/rewards/mean", "+.2f"),
    "pass@1": ("train/pass@1", ".0%"),
    "val": ("val/pass@1", ".0%"),
    "ER": ("cal/overall/layer_1/Effective Rank/mean", ".2f"),
    "ERV": ("cal/overall/layer_1/Effective Rank diff/mean", "+.3f"),
    "ERA": ("cal/overall/layer_1/Effective Rank diff 2/mean", "+.3f"),
    "tok/s": ("perf/throughput", ".0f"),
    "open groups": ("async/outstanding", ".0f"),
    "carried over": ("async/carried_over_tokens", ".0f"),
    "lag": ("async/lag/mean", ".2f"),
}


def run_ppo(config: PPOConfig) -> None:
    """Run a training job. If possible, errors in config, data and custom code are reported before Ray starts.

    Raises:
        ConfigError: If the config is incompatible with the data or the machine.
        WorkerError: If a worker raised an exception or died.
    """
    setup = TrainingSetup(config, [check_learning_signal])
    run = TrainingRun(config, setup.steps, COLUMNS, setup.device_type)
    with run:
        if _is_done(run, setup):
            return
        _announce(run, setup)
        ppo = run.attempts(lambda: _train(run, setup))
        run.write_summary(_summary(config, ppo.step, ppo.validations, ppo.timer.totals))
    show_validations(run.display, ppo.validations, config.rollout.val_kwargs)
    run.report(ppo.timer.totals)


def check_learning_signal(config: PPOConfig) -> None:
    """Raise ``ConfigError`` if the advantage or KL estimator cannot be loaded."""
    AdvantageEstimation(config, RewardManager(config.reward_manager))


def _is_done(run: TrainingRun, setup: TrainingSetup) -> bool:
    """Find the checkpoint to resume from. If the run is already complete, report this and return True."""
    config, trainer = setup.config, setup.config.trainer
    if trainer.val_only and (run.folder / "summary.json").exists() and latest_checkpoint(run.folder) is None:
        changed = changed_options(run.folder / "config.yaml", asdict(config))
        if changed:
            field = f"trainer.default_local_dir={trainer.default_local_dir!r}"
            raise ConfigError(f"{field}: holds a run with other options ({changed[0]}); name another folder")
        run.display.say(f"the run is complete: {run.folder}/summary.json holds its validation")
        return True
    parts = {"actor": config.model} | ({"critic": config.critic.model} if config.uses_critic else {})
    # A validation-only run does not load the teacher's moving average.
    parts |= {"teacher": config.model} if config.teacher.is_average and not trainer.val_only else {}
    digests = run_digests(config, setup.tokenizer, data_by_file(setup.train_set))
    resumption = run.find_resumption("ppo", len(setup.train_set), parts, digests)
    if resumption is None:
        return False
    _check_resumption(setup, resumption)
    if not run.is_complete(resumption) or trainer.val_only:
        return False
    state = resumption.state
    summary = _summary(config, resumption.step, saved_validations(state), state["seconds_by_phase"])
    run.report_complete(resumption, summary)
    return True


def _announce(run: TrainingRun, setup: TrainingSetup) -> None:
    """Print the first prompt, warnings and the length of the run."""
    first = setup.tokenizer.decode(setup.train_set[0].input_ids)
    run.display.say(f"the first of {len(setup.train_set)} training prompts: {first!r:.500}")
    for line in setup.warnings:
        run.display.say(f"warning: {line}")
    for line in start_notes(setup.config):
        run.display.say(f"note: {line}")
    run.display.say(setup.config.trainer.length_note(setup.steps_per_epoch))


def _train(run: TrainingRun, setup: TrainingSetup) -> RayPPOTrainer:
    config, trainer = setup.config, setup.config.trainer
    tokenizer, strings = setup.tokenizer, setup.stop_strings
    verifiers = run.resources.enter_context(VerifierPool(config.reward_score, run.busy_cores, run.folder))
    conversations, turns = None, config.rollout.multi_turn
    if turns.enable:
        processes = conversation_pool(turns, run.busy_cores, run.folder / ENVIRONMENT_LOG)
        conversations = setup.conversations(run.resources.enter_context(processes), run.display.say)
    environment = engine_environment(setup.device_type, config.rollout.name)
    tracker, workers = run.start("verl.workers.hybrid:HybridWorker", (setup.steps, strings), environment)
    method, sources = setup.new_method(), logged_sources(record.data_source for record in setup.train_set.records)
    options = (setup.loss.needs.whole_groups, conversations)
    if config.rollout.has_pool:
        parallel = config.rollout.tensor_parallel_size
        pool = run.start_engines("verl.workers.rollout:RolloutWorker", (strings,), environment, parallel)
        policy: PolicyWorkers = PooledPolicyWorkers(workers, config, pool, *options)
    else:
        policy = PolicyWorkers(workers, config, *options)
    judging, judge = None, config.reward_score.judge
    if judge.waits:
        judges = None
        if judge.is_frozen:
            policy.finish_generation()
            environment = engine_environment(setup.device_type)
            judges = run.start_judge("verl.workers.judge:JudgeWorker", environment, workers)
        judging = Judging(config, verifiers, policy, setup.judge_tokenizer, judges)
    rewards = ResponseRewards(config, setup.reward_tokenizer, workers)
    prompts = setup.train_set.records
    kind = PartialRolloutScheduler if config.async_training.partial_rollout else RolloutScheduler
    scheduler = kind(
        config, tokenizer, policy, verifiers, strings, method, rewards, sources, prompts, setup.steps, judging
    )
    store = run.resources.enter_context(SampleStore(run.folder, trainer.samples, run.attempt, run.display.say))
    samples = SampleLogger(store, trainer.log_samples, tokenizer, tracker, run.display)
    ppo = RayPPOTrainer(setup, workers, scheduler, tracker, samples, run)
    if run.resumption is not None:
        ppo.restore(run.resumption)
    if config.rollout.check_weights:
        run.display.stage("checking the engines' weights")
        check_weights(config, policy, prompts, ppo.step)
    ppo.fit()
    return ppo


def _check_resumption(setup: TrainingSetup, resumption: Resumption) -> None:
    """Raise ``ConfigError`` if the checkpoint is incompatible with the options."""
    config = setup.config
    shuffle, trainer = config.data.shuffle, config.trainer
    if resumption.state["shuffle"] != shuffle:
        raise ConfigError(
            f"data.shuffle={shuffle}: was {not shuffle} when {resumption.folder} was written, so the position in the "
            "data would be lost; set it back, or start a new run from the model it holds"
        )
    before, now = resumption.state["order"], prompt_order(config, setup.method)
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
    setup.method.load_state(resumption.state["method"])
    try:
        RewardManager(config.reward_manager).load_state_dict(resumption.state["reward_manager"])
    except ValueError as error:
        raise ConfigError(f"{resumption.folder}: {error}") from error


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


def show_validations(
    display: RunDisplay, validations: Mapping[int, Mapping[str, float]], sampling: SamplingConfig
) -> None:
    """Print a table of the first and last validations if there are at least two."""
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
    display.table(f"Validation ({sampling})", ["", f"step {first}", f"step {last}"], rows)
