"""Supervised fine-tuning on conversations: the loop, from a checked config to ``summary.json``."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torchdata.stateful_dataloader import StatefulDataLoader

from verl.checkpoint.folders import remove_unfinished
from verl.checkpoint.resume import (
    Resumption,
    best_validation,
    check_resumable,
    find_resumption,
    saved_validations,
    telling_how_to_go_on,
)
from verl.checkpoint.run_lock import locked
from verl.checkpoint.saver import CheckpointSaver
from verl.config.errors import ConfigError
from verl.config.sft import SFTConfig
from verl.data.conversations import ConversationDataset, collate_conversations, conversation_loader
from verl.models.checks import check_length, check_model
from verl.models.tokenizer import load_tokenizer
from verl.protocol import ConversationBatch
from verl.run.display import RunDisplay, share_rows
from verl.run.tracking import Tracker, write_summary
from verl.single_controller import WorkerGroup
from verl.single_controller.cluster import ray_cluster, resolve_device
from verl.single_controller.roles import SFTWorkers
from verl.trainer.logging.speed import UPDATE, UPDATE_LORA, ModelCost, StepMetrics, peak_tflops
from verl.trainer.logging.step_profiler import StepProfiler, check_profile_steps
from verl.trainer.logging.timing import PhaseTimer, Work
from verl.trainer.schedule import is_due, numbered_batches
from verl.utils.json_state import from_json, to_json

COLUMNS = {
    "loss": ("train/loss", ".3f"),
    "val loss": ("val/loss", ".3f"),
    "sequence probability": ("val/sequence_probability", ".1%"),
    "tok/s": ("perf/throughput", ".0f"),
}
"""What the progress bar shows: header -> (metric, format)."""


BEST_BY = "val/sequence_probability"
"""The validation metric of which the highest value makes a checkpoint the best."""


class SFTTrainer:
    """Drives the workers; stops after the last step or when held-out sequences are probable enough."""

    def __init__(
        self,
        config: SFTConfig,
        loader: StatefulDataLoader,
        held_out: ConversationBatch | None,
        workers: WorkerGroup,
        tracker: Tracker,
        display: RunDisplay,
    ) -> None:
        self.config = config
        self.loader = loader
        self.held_out = held_out
        self.workers = workers
        self.tracker = tracker
        self.display = display
        self.model = SFTWorkers(workers, config)
        self.timer = PhaseTimer(display.phase, workers.take_peak_memory)
        trainer = config.trainer
        peak = peak_tflops(trainer.peak_tflops, workers.device_name, config.model.param_dtype)
        passes = {"train": (ModelCost.of(config.model), UPDATE_LORA if config.model.lora.rank else UPDATE)}
        self.step_metrics = StepMetrics(workers.world_size, "train", passes, peak)
        self.profiler = StepProfiler(workers, trainer.profile_steps, Path(trainer.default_local_dir), display.say)
        self.total_steps = config.trainer.num_steps(len(loader))
        self.step = 0
        self.metrics: dict[str, float] = {}
        self.validations: dict[int, dict[str, float]] = {}
        trainer = config.trainer
        self.saver = CheckpointSaver(
            Path(trainer.default_local_dir),
            workers,
            trainer.async_save,
            trainer.save_hf_model,
            newest=trainer.max_ckpt_to_keep,
        )

    def restore(self, resumption: Resumption) -> None:
        """Go to where a checkpoint was written."""
        state = resumption.state
        self.workers.run("load", resumption.folder, resumption.step)
        self.step = resumption.step
        self.loader.load_state_dict(from_json(state["loader"]))
        self.validations = saved_validations(state)
        self.timer.totals.update(state["seconds_by_phase"])

    def fit(self) -> None:
        """Train from the step after the one reached, 0 at first, to the end."""
        for step, batch in numbered_batches(self.loader, self.step, self.total_steps):
            self.step = step
            num_tokens = int(batch.loss_mask[:, 1:].sum())
            self.profiler.begin(step)
            with self.timer.phase("train"):
                self.metrics = self.model.update(batch, num_tokens)
            self.timer.count("train", Work.of(batch.attention_mask.sum(dim=1)))
            self.profiler.end(step)
            if self._due(self.config.trainer.test_freq) and self.held_out is not None:
                self._validate(self.held_out)
            # Before the checkpoint: a run that goes on from it has the record of its step.
            self._log()
            reached = has_reached(self.config, self.validations)
            if reached or self._due(self.config.trainer.save_freq):
                self._save()
            self.saver.poll()
            if reached:
                break
        with self.timer.phase("save_checkpoint"):
            self.saver.finish()

    def _due(self, frequency: int) -> bool:
        return is_due(self.step, self.total_steps, frequency)

    def _validate(self, held_out: ConversationBatch) -> None:
        with self.timer.phase("testing"):
            logprobs, tokens = self.model.evaluate(held_out).unbind(dim=1)
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

    def _log(self) -> None:
        timing = self.step_metrics(self.timer.take_step())
        self.tracker.log(self.step, self.metrics | timing)
        if "val/loss" in self.metrics or self.display.console.is_terminal:
            self.display.step(self.step, self.metrics | timing)


def run_sft(config: SFTConfig) -> None:
    """Train. Everything that can be wrong with config and data is found before Ray starts.

    Raises:
        ConfigError: the config and the data or the machine do not fit.
        WorkerError: a worker raised or died.
    """
    device_type = resolve_device(config.device)
    tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
    try:
        check_model(config.model, "model", device_type)
        check_length(config.model, "model", config.data.max_length)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    data, trainer, world_size = config.data, config.trainer, config.trainer.world_size
    train_set = ConversationDataset(data.train_files, tokenizer, data)
    loader = conversation_loader(train_set, data.train_batch_size, tokenizer.pad_token_id, config.seed)
    held_out = None
    if data.val_files:
        val_set = ConversationDataset(data.val_files, tokenizer, data)
        held_out = collate_conversations(val_set.conversations, tokenizer.pad_token_id)
    steps = config.trainer.num_steps(len(loader))
    check_profile_steps(config.trainer.profile_steps, steps)

    folder = Path(trainer.default_local_dir)
    with ExitStack() as stack:
        stack.enter_context(locked(folder))
        stack.enter_context(telling_how_to_go_on(trainer))
        display = RunDisplay(trainer.experiment_name, steps, COLUMNS)
        resumption = find_resumption(config, trainer, display.say)
        if resumption is not None:
            check_resumable(resumption, "sft", len(train_set), {"actor": config.model})
            if resumption.step >= steps or has_reached(config, saved_validations(resumption.state)):
                if not (folder / "summary.json").exists():
                    state = resumption.state
                    write_summary(
                        folder, _summary(config, resumption.step, state["metrics"], state["seconds_by_phase"])
                    )
                display.say(f"the run is complete: step {resumption.step} was its last")
                return
        last_step = None if resumption is None else resumption.step
        tracker = Tracker(folder, trainer.logger, trainer.project_name, trainer.experiment_name, config, last_step)
        stack.callback(tracker.close)
        display.say(
            f"{trainer.experiment_name}: at most {steps} steps on {world_size} {device_type} workers, into {folder}"
        )
        # Once Ray has ended, with the workers that may still have been writing.
        stack.callback(remove_unfinished, folder)
        stack.enter_context(ray_cluster(world_size, device_type))
        workers = WorkerGroup(
            "verl.workers.sft:SFTWorker",
            config,
            (steps,),
            trainer.nnodes,
            trainer.n_gpus_per_node,
            device_type,
            environment={},
        )
        stack.callback(workers.close)
        stack.enter_context(display)
        sft = SFTTrainer(config, loader, held_out, workers, tracker, display)
        if resumption is not None:
            sft.restore(resumption)
        sft.fit()
        tracker.summarize(_summary(config, sft.step, sft.metrics, sft.timer.totals))
    display.table("Time by phase", ["phase", "seconds", "share"], share_rows(sft.timer.totals))
    model = "/actor/huggingface" if trainer.save_hf_model else ""
    display.say(f"model: {folder}/global_step_{sft.step}{model}")


def has_reached(config: SFTConfig, validations: Mapping[int, Mapping[str, float]]) -> bool:
    """Whether a validation so far lets the run end early."""
    target = config.trainer.stop_at_sequence_probability
    return target < 1 and any(metrics[BEST_BY] >= target for metrics in validations.values())


def _summary(
    config: SFTConfig, step: int, metrics: Mapping[str, float], seconds_by_phase: Mapping[str, float]
) -> dict[str, Any]:
    return {"steps": step, "seed": config.seed, "after": dict(metrics), "seconds_by_phase": dict(seconds_by_phase)}
