"""Supervised fine-tuning on conversations: the loop, from a checked config to ``summary.json``."""

from contextlib import ExitStack
from pathlib import Path

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from verl.config.load import ConfigError
from verl.config.sft import SFTConfig
from verl.data.conversations import ConversationDataset, collate_conversations, conversation_loader
from verl.data.tokenizers import load_tokenizer
from verl.protocol import ConversationBatch
from verl.single_controller import WorkerGroup, concat
from verl.trainer.checkpoints import save_checkpoint
from verl.trainer.launch import ray_cluster, resolve_device
from verl.trainer.progress import RunDisplay, share_rows
from verl.trainer.steps import is_due, numbered_batches
from verl.trainer.timing import PhaseTimer
from verl.trainer.tracking import Tracker
from verl.workers.forward import check_layout

COLUMNS = {
    "loss": ("train/loss", ".3f"),
    "val loss": ("val/loss", ".3f"),
    "sequence probability": ("val/sequence_probability", ".1%"),
    "tok/s": ("perf/throughput", ".0f"),
}
"""What the progress bar shows: header -> (metric, format)."""


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
        self.timer = PhaseTimer(display.phase)
        self.total_steps = config.trainer.num_steps(len(loader))
        self.step = 0
        self.metrics: dict[str, float] = {}

    def fit(self) -> None:
        """Train to the end."""
        for step, batch in numbered_batches(self.loader, self.total_steps):
            self.step = step
            num_tokens = int(batch.loss_mask[:, 1:].sum())
            with self.timer.phase("train"):
                self.metrics = self.workers.run_split("train_step", batch, num_tokens)[0]
            if self._due(self.config.trainer.test_freq) and self.held_out is not None:
                self._validate(self.held_out)
            reached = self.metrics.get("val/sequence_probability", 0.0) >= self._target
            if reached or self._due(self.config.trainer.save_freq):
                self._save()
            self._log(int(batch.attention_mask.sum()))
            if reached:
                return

    @property
    def _target(self) -> float:
        return self.config.trainer.stop_at_sequence_probability

    def _due(self, frequency: int) -> bool:
        return is_due(self.step, self.total_steps, frequency)

    def _validate(self, held_out: ConversationBatch) -> None:
        with self.timer.phase("validate"):
            # Ranks must do the same number of forward passes: shares are filled up to one size, the filling dropped.
            filling = held_out[: -len(held_out) % self.workers.world_size]
            results = concat(self.workers.run_split("evaluate", torch.cat([held_out, filling])))
            logprobs, tokens = results[: len(held_out)].unbind(dim=1)
        self.metrics["val/loss"] = (-logprobs.sum() / tokens.sum()).item()
        self.metrics["val/sequence_probability"] = logprobs.exp().mean().item()

    def _save(self) -> None:
        root = Path(self.config.trainer.default_local_dir)
        with self.timer.phase("save"):
            save_checkpoint(root, self.step, lambda folder: self.workers.run("save", folder), {"step": self.step})

    def _log(self, num_tokens: int) -> None:
        timing = self.timer.take_step()
        timing["perf/throughput"] = num_tokens / timing["timing_s/train"]
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
        check_layout(config.model, "model")
    except ValueError as error:
        raise ConfigError(str(error)) from error
    data, trainer, world_size = config.data, config.trainer, config.trainer.world_size
    train_set = ConversationDataset(data.train_files, tokenizer, data)
    loader = conversation_loader(train_set, data.train_batch_size, tokenizer.pad_token_id, config.seed)
    held_out = None
    if data.val_files:
        val_set = ConversationDataset(data.val_files, tokenizer, data)
        if len(val_set) < world_size:
            raise ConfigError(f"data.val_files: {len(val_set)} conversations cannot be split over {world_size} workers")
        held_out = collate_conversations(val_set.conversations, tokenizer.pad_token_id)
    steps = config.trainer.num_steps(len(loader))

    with ExitStack() as stack:
        folder = Path(config.trainer.default_local_dir)
        tracker = Tracker(folder, trainer.logger, trainer.project_name, trainer.experiment_name, config)
        stack.callback(tracker.close)
        display = RunDisplay(trainer.experiment_name, steps, COLUMNS)
        display.say(
            f"{trainer.experiment_name}: at most {steps} steps on {world_size} {device_type} workers, into {folder}"
        )
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
        sft.fit()
        tracker.summarize(
            {"steps": sft.step, "seed": config.seed, "after": sft.metrics, "seconds_by_phase": sft.timer.totals}
        )
    display.table("Time by phase", ["phase", "seconds", "share"], share_rows(sft.timer.totals))
    display.say(f"model: {folder}/global_step_{sft.step}/actor/huggingface")
