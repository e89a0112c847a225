"""The worker of supervised fine-tuning: one sharded model, its optimizer, and held-out probabilities."""

import torch
from torch import Tensor

from verl.algorithms.losses import token_mean
from verl.config.sft import SFTConfig
from verl.data.tokenizers import load_tokenizer
from verl.protocol import ConversationBatch
from verl.workers.checkpoint import Checkpointed, CheckpointWorker, TrainedPart
from verl.workers.distributed import WorkerPlace, join_world, seed_everything
from verl.workers.forward import token_logprobs
from verl.workers.fsdp import load_sharded_model
from verl.workers.learner import Learner


class SFTWorker(Checkpointed):
    """One of the processes that hold the model. Every method is called on all workers at once."""

    def __init__(self, config: SFTConfig, place: WorkerPlace, total_steps: int) -> None:
        seed_everything(config.seed)
        mesh = join_world(place)
        self.device = mesh.device_type
        self.micro_batch_size = config.data.micro_batch_size_per_gpu
        self.tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
        self.model = load_sharded_model(config.model, mesh, trainable=True)
        self.learner = Learner(self.model, config.optim, total_steps)
        self.checkpoints = CheckpointWorker(
            [TrainedPart("actor", self.learner, config.model, self.tokenizer)], config.seed
        )

    def train_step(self, batch: ConversationBatch, num_tokens: int) -> dict[str, float]:
        """One optimizer step on this worker's share; ``num_tokens`` counts the learned tokens of all shares."""
        sums, state = self.learner.step(self._loss(micro, num_tokens) for micro in batch.split(self.micro_batch_size))
        return {f"train/{name}": value for name, value in (sums | state).items()}

    @torch.no_grad()
    def evaluate(self, batch: ConversationBatch) -> Tensor:
        """[B, 2] float64: each conversation's log-probability of what is to be learned, and the tokens it has."""
        rows = []
        for micro in batch.split(self.micro_batch_size):
            logprobs, mask = self._score(micro)
            rows.append(torch.stack([(logprobs.double() * mask).sum(dim=1), mask.double().sum(dim=1)], dim=1).cpu())
        return torch.cat(rows)

    def _loss(self, micro: ConversationBatch, num_tokens: int) -> tuple[Tensor, dict[str, Tensor]]:
        logprobs, mask = self._score(micro)
        loss = token_mean(-logprobs, mask, num_tokens)
        return loss, {"loss": loss}

    def _score(self, micro: ConversationBatch) -> tuple[Tensor, Tensor]:
        """Log-probabilities [B, S-1] of all tokens but the first, and the mask [B, S-1] of those to learn."""
        longest = int(micro.attention_mask.sum(dim=1).max())
        input_ids = micro.input_ids[:, :longest].to(self.device)
        attention_mask = micro.attention_mask[:, :longest].to(self.device)
        logprobs, _ = token_logprobs(self.model, input_ids, attention_mask, longest - 1, temperature=1.0)
        return logprobs, micro.loss_mask[:, 1:longest].to(self.device)
