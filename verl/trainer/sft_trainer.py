"""Supervised fine-tuning on conversations."""

from collections.abc import Mapping
from typing import Any

from torchdata.stateful_dataloader import StatefulDataLoader

from verl.batch import Batch
from verl.checkpoint.digests import run_digests
from verl.checkpoint.resume import saved_validations
from verl.cluster.start import resolve_device
from verl.config.sft import SFTConfig
from verl.data.conversations import ConversationDataset, conversation_batch, conversation_loader
from verl.models.checks import check_length, check_model
from verl.models.hub import fetch_model
from verl.models.tokenizer import check_embeds_tokens, load_tokenizer
from verl.run.session import TrainingRun
from verl.run.setup import check_profile_steps
from verl.run.tracker_backends import check_trackers
from verl.run.tracking import Tracker
from verl.single_controller.roles import ModelWorkers
from verl.single_controller.worker_group import WorkerGroup
from verl.trainer.logging.speed import BATCH, ModelCost, StepMetrics, Work, peak_tflops
from verl.trainer.training import SkippedUpdates, Trainer, endless

COLUMNS = {
    "loss": ("train/loss", ".3f"),
    "val loss": ("val/loss", ".3f"),
    "sequence probability": ("val/sequence_probability", ".1%"),
    "tok/s": ("perf/throughput", ".0f"),
}

BEST_BY = "val/sequence_probability"
"""Validation metric whose highest value marks the best checkpoint."""


class SFTTrainer(Trainer):
    """Trainer that stops after a fixed number of steps, or earlier if held-out sequences reach a target probability."""

    best_by = BEST_BY

    def __init__(
        self,
        config: SFTConfig,
        loader: StatefulDataLoader,
        held_out: Batch | None,
        workers: WorkerGroup,
        tracker: Tracker,
        run: TrainingRun,
    ) -> None:
        super().__init__(config, loader, workers, tracker, run)
        self.config = config
        self.held_out = held_out
        self.model = ModelWorkers(workers, config.model.ulysses_sequence_parallel_size)
        peak = peak_tflops(config.trainer.peak_tflops, workers.device_name, config.model.param_dtype)
        passes = {"train": (ModelCost.of(config.model), ModelCost.update_passes(config.model))}
        self.step_metrics = StepMetrics(workers.world_size, passes, peak)
        self.skipped = SkippedUpdates("train", "optim", config.optim)

    def _train(self) -> None:
        batches = endless(self.loader)
        while self.step < self.total_steps:
            batch = next(batches)
            self.step += 1
            self.profiler.begin(self.step)
            with self.timer.phase("train"):
                update = self.model.run_update("train_step", batch, int(batch.learn_mask.sum()))
                self.metrics = self.skipped.summarise([update], self.step)
            for name in (BATCH, "train"):
                self.timer.count(name, Work.of(batch.lengths))
            self.profiler.end(self.step)
            if self._due(self.config.trainer.test_freq) and self.held_out is not None:
                self._validate(self.held_out)
            # Log before saving the checkpoint, so that a resumed run has this step's metrics.
            self._log()
            if target_reached(self.config, self.validations):
                self.total_steps = self.step
            if self._due(self.config.trainer.save_freq):
                self._save()
            self.saver.poll()
            if self.step < self.total_steps:
                self.preemption.after_step(self.step, self._save_now)

    def _validate(self, held_out: Batch) -> None:
        with self.timer.phase("testing"):
            totals = self.model.map_rows("evaluate", held_out)
            logprobs, tokens = totals.total_logprob, totals.num_learned
        self.validations[self.step] = {
            "val/loss": (-logprobs.sum() / tokens.sum()).item(),
            BEST_BY: logprobs.exp().mean().item(),
        }
        self.metrics |= self.validations[self.step]

    def _state(self) -> dict[str, Any]:
        return super()._state() | {"job": "sft", "metrics": self.metrics}

    def _log(self) -> None:
        timing = self.step_metrics(self.timer.take_step())
        self.tracker.log(self.step, self.metrics | timing)
        self.display.step(self.step, self.metrics | timing)


def run_sft(config: SFTConfig) -> None:
    """Run a training job, after checking config and data before Ray starts.

    Raises:
        ConfigError: If the config is incompatible with the data or the machine.
        WorkerError: If a worker raised an exception or died.
    """
    check_trackers(config.trainer.logger)
    device_type = resolve_device(config.device, *config.trainer.place)
    fetch_model(config.model.path, "model.path")
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
        digests = run_digests(config, tokenizer, train_set.digests)
        resumption = run.find_resumption("sft", len(train_set), {"actor": config.model}, digests)
        if resumption is not None:
            state = resumption.state
            if run.is_complete(resumption) or target_reached(config, saved_validations(state)):
                summary = _summary(config, resumption.step, state["metrics"], state["seconds_by_phase"])
                run.report_complete(resumption, summary)
                return
        run.display.say(trainer.length_note(len(loader)))
        if config.optim.lr_warmup_steps > steps:
            run.display.say(
                f"note: optim.lr_warmup_steps={config.optim.lr_warmup_steps}: cut to the run's {steps} steps"
            )
        run.display.say(f"optim.lr={config.optim.lr:g} model.param_dtype={config.model.param_dtype}")

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
    """Return whether ``trainer.stop_at_sequence_probability`` is below 1 and any validation has reached it."""
    target = config.trainer.stop_at_sequence_probability
    return target < 1 and any(metrics[BEST_BY] >= target for metrics in validations.values())


def _summary(
    config: SFTConfig, step: int, metrics: Mapping[str, float], seconds_by_phase: Mapping[str, float]
) -> dict[str, Any]:
    return {"steps": step, "seed": config.seed, "after": dict(metrics), "seconds_by_phase": dict(seconds_by_phase)}
