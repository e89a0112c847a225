"""Supervised fine-tuning on conversations: the loop, from a checked config to ``summary.json``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchdata.stateful_dataloader import StatefulDataLoader

from verl.batch import Batch
from verl.checkpoint.resume import Resumption, best_validation, saved_validations
from verl.checkpoint.saver import CheckpointSaver
from verl.config.sft import SFTConfig
from verl.data.conversations import ConversationDataset, conversation_batch, conversation_loader
from verl.models.hub import fetch_models
from verl.models.info import check_length
from verl.models.loading import check_model
from verl.models.tokenizer import check_embeds_tokens, load_tokenizer
from verl.run.session import TrainingRun
from verl.run.sinks import check_trackers
from verl.run.tracking import Tracker
from verl.single_controller.cluster import resolve_device
from verl.single_controller.roles import SFTWorkers
from verl.single_controller.worker_group import WorkerGroup
from verl.trainer.logging.speed import UPDATE, UPDATE_LORA, ModelCost, StepMetrics, peak_tflops
from verl.trainer.logging.step_profiler import StepProfiler, check_profile_steps
from verl.trainer.logging.timing import PhaseTimer, Work
from verl.trainer.schedule import is_due, numbered_batches
from verl.trainer.skipped_updates import SkippedUpdates
from verl.utils.json_state import from_json, to_json

COLUMNS = {
    "loss": ("train/loss", ".3f"),
    "val loss": ("val/loss", ".3f"),
    "sequence probability": ("val/sequence_probability", ".1%"),
    "tok/s": ("perf/throughput", ".0f"),
}

BEST_BY = "val/sequence_probability"
"""The validation metric whose highest value marks the best checkpoint."""


class SFTTrainer:
    """Drives the workers; stops after the last step, or early once held-out sequences are probable enough."""

    def __init__(
        self,
        config: SFTConfig,
        loader: StatefulDataLoader,
        held_out: Batch | None,
        workers: WorkerGroup,
        tracker: Tracker,
        run: TrainingRun,
    ) -> None:
        self.config = config
        self.loader = loader
        self.held_out = held_out
        self.workers = workers
        self.tracker = tracker
        self.display = run.display
        self.preemption = run.preemption
        self.model = SFTWorkers(workers, config)
        self.timer = PhaseTimer(run.display.phase, workers.take_peak_memory)
        trainer = config.trainer
        peak = peak_tflops(trainer.peak_tflops, workers.device_name, config.model.param_dtype)
        passes = {"train": (ModelCost.of(config.model), UPDATE_LORA if config.model.trains_adapters else UPDATE)}
        self.step_metrics = StepMetrics(workers.world_size, "train", passes, peak)
        folder = Path(trainer.default_local_dir)
        self.profiler = StepProfiler(workers, trainer.profile_steps, folder, run.display.say)
        self.total_steps = trainer.num_steps(len(loader))
        self.skipped = SkippedUpdates("train", "optim", config.optim)
        self.step = 0
        self.metrics: dict[str, float] = {}
        self.validations: dict[int, dict[str, float]] = {}
        newest, background = trainer.max_ckpt_to_keep, trainer.saves_in_background(workers.device_type)
        self.saver = CheckpointSaver(run.attempt, workers, background, trainer.save_hf_model, newest)

    def restore(self, resumption: Resumption) -> None:
        """Restore workers and trainer from a checkpoint."""
        state = resumption.state
        self.workers.run("load", resumption.folder, resumption.step)
        self.step = resumption.step
        self.loader.load_state_dict(from_json(state["loader"]))
        self.validations = saved_validations(state)
        self.timer.totals.update(state["seconds_by_phase"])

    def fit(self) -> None:
        """Train from the step after the last one done to the end."""
        with self.preemption.finishing_steps():
            self._train()
        with self.timer.phase("save_checkpoint"):
            self.saver.finish()

    def _train(self) -> None:
        """The steps that are left."""
        for step, batch in numbered_batches(self.loader, self.step, self.total_steps):
            self.step = step
            num_tokens = int(batch.learn_mask.sum())
            self.profiler.begin(step)
            with self.timer.phase("train"):
                self.metrics = self.skipped.summarise([self.model.update(batch, num_tokens)], step)
            self.timer.count("train", Work.of(batch.lengths))
            self.profiler.end(step)
            if self._due(self.config.trainer.test_freq) and self.held_out is not None:
                self._validate(self.held_out)
            # Before the checkpoint: a run that resumes from it has the record of its step.
            self._log()
            if target_reached(self.config, self.validations):
                self.total_steps = step
            if self._due(self.config.trainer.save_freq):
                self._save()
            self.saver.poll()
            if step == self.total_steps:
                break
            self.preemption.after_step(step, self._save_now)

    def _due(self, frequency: int) -> bool:
        return is_due(self.step, self.total_steps, frequency)

    def _validate(self, held_out: Batch) -> None:
        with self.timer.phase("testing"):
            logprobs, tokens = self.model.evaluate(held_out)
        self.validations[self.step] = {
            "val/loss": (-logprobs.sum() / tokens.sum()).item(),
            BEST_BY: logprobs.exp().mean().item(),
        }
        self.metrics |= self.validations[self.step]

    def _save(self) -> None:
        state = {
            "job": "sft",
            "step": self.step,
            "num_examples": len(self.loader.dataset),
            "loader": to_json(self.loader.state_dict()),
            "best": best_validation(self.validations, BEST_BY),
            "validations": self.validations,
            "metrics": self.metrics,
            "seconds_by_phase": self.timer.totals,
        }
        scores = {step: metrics[BEST_BY] for step, metrics in self.validations.items()}
        with self.timer.phase("save_checkpoint"):
            self.saver.save(self.step, state, scores)

    def _save_now(self) -> None:
        """Have a complete checkpoint of this step."""
        self.saver.finish()
        if self.saver.saved_step != self.step:
            self._save()
            self.saver.finish()

    def _log(self) -> None:
        timing = self.step_metrics(self.timer.take_step())
        self.tracker.log(self.step, self.metrics | timing)
        if "val/loss" in self.metrics or self.display.console.is_terminal:
            self.display.step(self.step, self.metrics | timing)


def run_sft(config: SFTConfig) -> None:
    """Train. Everything that can be wrong with config and data is found before Ray starts.

    Raises:
        ConfigError: the config does not fit the data or the machine.
        WorkerError: a worker raised or died.
    """
    check_trackers(config.trainer.logger)
    device_type = resolve_device(config.device, *config.trainer.place)
    fetch_models({"model": config.model})
    tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
    check_model(config.model, "model", device_type)
    check_embeds_tokens(config.model, "model.path", tokenizer)
    check_length(config.model, "model", config.data.max_length)
    data, trainer = config.data, config.trainer
    train_set = ConversationDataset(data.train_files, tokenizer, data)
    loader = conversation_loader(train_set, data.train_batch_size, config.seed)
    held_out = None
    if data.val_files:
        val_set = ConversationDataset(data.val_files, tokenizer, data)
        held_out = conversation_batch(val_set.conversations)
    steps = trainer.num_steps(len(loader))
    check_profile_steps(trainer.profile_steps, steps)

    run = TrainingRun(config, steps, COLUMNS, device_type)
    with run:
        resumption = run.find_resumption("sft", len(train_set), {"actor": config.model})
        if resumption is not None:
            state = resumption.state
            if run.is_complete(resumption) or target_reached(config, saved_validations(state)):
                summary = _summary(config, resumption.step, state["metrics"], state["seconds_by_phase"])
                run.report_complete(resumption, summary)
                return
        run.display.say(trainer.length_note(len(loader)))

        def train() -> SFTTrainer:
            tracker, workers = run.start("verl.workers.sft:SFTWorker", (steps,), environment={})
            batches = conversation_loader(train_set, data.train_batch_size, config.seed)
            sft = SFTTrainer(config, batches, held_out, workers, tracker, run)
            if run.resumption is not None:
                sft.restore(run.resumption)
            sft.fit()
            return sft

        sft = run.attempts(train)
        run.write_summary(_summary(config, sft.step, sft.metrics, sft.timer.totals))
    run.report(sft.timer.totals)


def target_reached(config: SFTConfig, validations: Mapping[int, Mapping[str, float]]) -> bool:
    """Whether a validation so far allows the run to stop early."""
    target = config.trainer.stop_at_sequence_probability
    return target < 1 and any(metrics[BEST_BY] >= target for metrics in validations.values())


def _summary(
    config: SFTConfig, step: int, metrics: Mapping[str, float], seconds_by_phase: Mapping[str, float]
) -> dict[str, Any]:
    return {"steps": step, "seed": config.seed, "after": dict(metrics), "seconds_by_phase": dict(seconds_by_phase)}
