"""A hybrid worker with windows: methods that tests need and training does not."""

import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
from groups import gradients_of
from torch import Tensor

from verl.batch import Batch
from verl.config.calculator import CalculatorConfig
from verl.models.fsdp import full_parameters
from verl.models.packing import position_ids
from verl.rank.calculator import RepresentationMetricsCalculator
from verl.rollout.decoding import StopStrings
from verl.workers.hybrid import HybridWorker


class ProbeWorker(HybridWorker):
    """Called by name through a ``WorkerGroup``."""

    def measure_states(self, calculator: CalculatorConfig | None) -> None:
        """Have the policy measure rank metrics, as with ``calculator.source=actor``."""
        self.calculator = None if calculator is None else RepresentationMetricsCalculator(calculator)

    def gradients(self, batch: Batch, num_tokens: int, num_sequences: int) -> dict[str, Tensor]:
        """The policy's gradients of one update, which is not made."""
        return gradients_of(self.actor.learner, lambda: self.actor.update(batch, num_tokens, num_sequences))[1]

    def parameters(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in full_parameters(self.actor.model)}

    def engine_greedy(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        """vLLM's greedy tokens."""
        from vllm import SamplingParams

        token_prompts = [{"prompt_token_ids": ids} for ids in prompts]
        parameters = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        outputs = self.rollout.engine.generate(token_prompts, parameters, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def loaded(self, package: str) -> bool:
        """Whether a package was imported in this process."""
        return package in sys.modules

    def set_batch_size(self, batch_size: int) -> None:
        """Responses that the rollout engine ``hf`` decodes at once."""
        self.rollout.batch_size = batch_size

    def stop_at(self, strings: list[str]) -> None:
        """Let these strings end the rollout engine's responses from now on."""
        self.rollout.stop_strings = strings
        self.rollout.stops = StopStrings(self.tokenizer, strings) if strings else None

    def engine_config(self) -> tuple[int, dict[str, Any]]:
        """Tokens of a block of vLLM's KV cache, and the rotary embedding of its model."""
        config = self.rollout.engine.llm_engine.vllm_config
        return config.cache_config.block_size, dict(config.model_config.hf_config.rope_parameters)

    def free_gpu_memory(self) -> int:
        """Bytes that no process has taken, once torch keeps nothing for later."""
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    def confuse(self, mistake: str) -> None:
        """Send engines wrong weights from now on; an empty string ends it."""
        self.mistake = mistake
        self.first_values: dict[str, Tensor] = {}

    def sync_weights(self, version: int) -> None:
        load, mistake = self.rollout.load_weights, getattr(self, "mistake", "")
        self.rollout.load_weights = lambda weights: load(
            self._confused(mistake, name, value) for name, value in weights
        )
        untied = patch("verl.rollout.weight_sync._refresh_tied_head") if mistake == "tied head" else nullcontext()
        with untied:
            super().sync_weights(version)
        self.rollout.load_weights = load

    def _confused(self, mistake: str, name: str, value: Tensor) -> tuple[str, Tensor]:
        if mistake == "layers exchanged":
            other = {"layers.0": "layers.1", "layers.1": "layers.0"}
            name = re.sub(r"layers\.[01]", lambda found: other[found[0]], name)
        if mistake == "experts rolled" and ".experts." in name and "*" in name:
            value = value.roll(1, dims=0)
        if mistake == "all stale" or (mistake == "stale" and name.endswith("q_proj.weight")):
            value = self.first_values.setdefault(name, value.clone())
        return name, value

    def sync_all_but(self, left_out: str) -> None:
        """Give the rollout engine the policy's weights except for one."""
        self.rollout.load_weights(pair for pair in full_parameters(self.actor.model) if pair[0] != left_out)

    def note_engine_calls(self) -> None:
        """Let a CPU's engine sleep as if it were a GPU's, and note every call it gets for ``engine_calls``."""
        self.calls: list[str] = []
        engine = self.rollout.engine

        def noted(name: str, method: Callable[..., Any], *shown: str) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                self.calls.append(" ".join([name, *(str(options[option]) for option in shown)]))
                return method(*arguments, **options)

            return call

        engine.sleep = noted("sleep", engine.sleep, "level")
        engine.wake_up = noted("wake_up", engine.wake_up, "tags")
        self.rollout.advance = noted("advance", self.rollout.advance)
        runner = engine.llm_engine.model_executor.driver_worker.worker.model_runner
        runner.reload_weights = noted("reload_weights", runner.reload_weights)
        self.rollout.memory.enabled = True

    def engine_calls(self) -> list[str]:
        """The calls since the last time this was asked."""
        calls, self.calls[:] = list(self.calls), []
        return calls

    def engine_sleeps(self) -> bool:
        """Whether vLLM itself takes the engine to be asleep, wholly or in part."""
        return self.rollout.engine.llm_engine.is_sleeping()

    @torch.no_grad()
    def trainer_greedy(self, prompts: list[list[int]], num_tokens: int) -> Tensor:
        """Greedy tokens [B, num_tokens] of the FSDP model, by one full forward per token."""
        ids, mask = Batch.of(prompts, [[] for _ in prompts]).rows()
        for _ in range(num_tokens):
            logits = self.actor.model(ids, attention_mask=mask, position_ids=position_ids(mask), use_cache=False).logits
            ids = torch.cat([ids, logits[:, -1:].argmax(dim=-1)], dim=1)
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
        return ids[:, -num_tokens:]
