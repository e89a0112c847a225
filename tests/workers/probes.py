"""A hybrid worker with windows: methods that tests need and training does not."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from verl.config.ppo import ActorConfig
from verl.protocol import PolicyBatch, PromptBatch
from verl.workers.forward import position_ids
from verl.workers.fsdp import full_parameters
from verl.workers.hybrid import HybridWorker


class ProbeWorker(HybridWorker):
    """Called by name through a ``WorkerGroup``."""

    def gradients(self, batch: PolicyBatch, num_tokens: int, num_sequences: int) -> dict[str, Tensor]:
        """Full gradients of one update, without applying it."""
        apply, self.actor.optimizer.step = self.actor.optimizer.step, lambda: None  # type: ignore[method-assign]
        self.actor.update(batch, num_tokens, num_sequences)
        self.actor.optimizer.step = apply  # type: ignore[method-assign]
        shards = self.actor.model.named_parameters()
        return {name: parameter.grad.full_tensor() for name, parameter in shards}

    def configure_actor(self, config: ActorConfig, micro_batch_size: int, changes: dict[str, Any]) -> None:
        self.actor.micro_batch_size = micro_batch_size
        self.actor.config = replace(config, **changes)

    def parameters(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in full_parameters(self.actor.model)}

    def engine_greedy(self, prompts: PromptBatch, num_tokens: int) -> list[list[int]]:
        """vLLM's greedy tokens."""
        from vllm import SamplingParams

        token_prompts = [
            {"prompt_token_ids": ids[mask.bool()].tolist()}
            for ids, mask in zip(prompts.input_ids, prompts.attention_mask, strict=True)
        ]
        parameters = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        outputs = self.rollout.engine.generate(token_prompts, parameters, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    @torch.no_grad()
    def trainer_greedy(self, prompts: PromptBatch, num_tokens: int) -> Tensor:
        """Greedy tokens [B, num_tokens] of the FSDP model, by one full forward per token."""
        ids, mask = prompts.input_ids, prompts.attention_mask
        for _ in range(num_tokens):
            logits = self.actor.model(ids, attention_mask=mask, position_ids=position_ids(mask), use_cache=False).logits
            ids = torch.cat([ids, logits[:, -1:].argmax(dim=-1)], dim=1)
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
        return ids[:, -num_tokens:]
