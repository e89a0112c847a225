"""Worker for supervised fine-tuning, which trains a sharded model and evaluates it on held-out data."""

import torch
from torch import Tensor

from verl.algorithms.losses import token_mean
from verl.batch import EPISODE, Batch
from verl.checkpoint.shards import CheckpointWorker, TrainedPart
from verl.config.sft import SFTConfig
from verl.models.learner import Learner
from verl.models.micro_batches import MicroBatching
from verl.models.output_head import Scoring
from verl.models.policy import Policy
from verl.models.tokenizer import load_tokenizer
from verl.utils.distributed import WorkerPlace, join_world, seed_everything
from verl.utils.process import set_stage


class SFTWorker(CheckpointWorker):
    """One of the processes over which the model is sharded. Each method must be called on all workers at once."""

    def __init__(self, config: SFTConfig, place: WorkerPlace, total_steps: int) -> None:
        set_stage("loading the model")
        seed_everything(config.seed)
        mesh = join_world(place)
        self.micro_batch_size = config.data.micro_batch_size_per_gpu
        self.tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
        batching = MicroBatching(self.micro_batch_size, None, config.model.use_remove_padding)
        self.policy = Policy(config.model, mesh, batching, temperature=1.0, trainable=True)
        offload, sequence = config.model.fsdp.optimizer_offload, config.model.ulysses_sequence_parallel_size
        self.learner = Learner(self.policy.model, config.optim.cut_to(total_steps), total_steps, offload, sequence)
        part = TrainedPart("actor", self.learner, self.policy.parameters, config.model, self.tokenizer)
        super().__init__([part], config.seed)

    def train_step(self, batch: Batch, num_tokens: int) -> dict[str, float]:
        """Take one optimizer step on this worker's share. ``num_tokens`` is the total number of learned tokens."""
        micros = list(batch.split(self.micro_batch_size))
        with self.policy.parameters.loaded():
            sums, state = self.learner.step(micros, lambda micro: self._loss(micro, num_tokens))
        return {f"train/{name}": value for name, value in (sums | state).items()}

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Batch:
        """Return the conversations with the number of learned tokens and the sum of their log-probabilities.

        The columns ``total_logprob`` and ``num_learned`` are float64 with one entry per episode.
        """
        parts = []
        with self.policy.parameters.loaded():
            for micro in batch.split(self.micro_batch_size):
                logprobs, mask = self._score(micro)
                totals = (logprobs.double() * mask).sum(dim=1).cpu()
                learned = mask.double().sum(dim=1).cpu()
                parts.append(micro.columns().fill(EPISODE, total_logprob=totals, num_learned=learned))
        return Batch.join(parts)

    def _loss(self, micro: Batch, num_tokens: int) -> tuple[Tensor, dict[str, Tensor]]:
        logprobs, mask = self._score(micro)
        loss = token_mean(-logprobs, mask, num_tokens)
        return loss, {"loss": loss}

    def _score(self, micro: Batch) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities of learned tokens (0 elsewhere) and their mask, both [B, R]."""
        micro = micro.trimmed()
        scored = self.policy.forward.logprobs(micro, Scoring(temperature=1.0), micro.learn_mask)
        return scored.padded("logprobs"), micro.to(self.policy.device).padded("learn_mask")
