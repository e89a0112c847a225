"""The vLLM engine in a worker's own process: samples responses and measures their hidden states on the spot.

Legend: B responses, P prompt length, R response length, L layers, D hidden width.
"""

from collections.abc import Iterable
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from vllm import LLM, CompletionOutput, SamplingParams

from verl.config.ppo import DataConfig, RolloutConfig, SamplingConfig
from verl.protocol import PromptBatch, RolloutBatch
from verl.workers.rollout.engine import engine_options, measured


class VLLMRollout:
    """Samples responses with log-probabilities, and measures their hidden states where ``capture`` asks for it."""

    def __init__(
        self,
        config: RolloutConfig,
        data: DataConfig,
        model_path: str,
        trust_remote_code: bool,
        device_type: str,
        seed: int,
        pad_token_id: int,
        capture: dict[str, Any] | None,
    ) -> None:
        """``capture``: options of ``vllm_patches``, whose reducer gives metrics ``[L]`` and ``mean_state [L, D]``."""
        self.pad_token_id = pad_token_id
        self.max_response_length = data.max_response_length
        self.measures = capture is not None
        max_model_len = data.max_prompt_length + data.max_response_length
        self.engine = LLM(
            model_path,
            # What is returned must be what was sampled from: after temperature, top-p and top-k.
            logprobs_mode="processed_logprobs",
            **engine_options(config, max_model_len, trust_remote_code, device_type, seed, capture),
        )

    def generate(self, prompts: PromptBatch, sampling: SamplingConfig, seed: int) -> RolloutBatch:
        """Sample ``sampling.n`` responses per prompt; the responses of one prompt are neighbours.

        Every response has its own random stream, set by ``seed``, its prompt's ``uid`` and its place in the group: the
        same whatever else is in the batch and whichever worker samples it.
        """
        token_prompts = [
            {"prompt_token_ids": ids[mask.bool()].tolist()}
            for ids, mask in zip(prompts.input_ids, prompts.attention_mask, strict=True)
        ]
        parameters = [self._sampling_params(sampling, seed, uid) for uid in prompts.uid.tolist()]
        outputs = self.engine.generate(token_prompts, parameters, use_tqdm=False)
        return self._collect(prompts, [completion for output in outputs for completion in output.outputs], sampling.n)

    def load_weights(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Replace the engine's weights, parameter by parameter, and drop what was cached under the old ones."""
        worker = self.engine.llm_engine.model_executor.driver_worker.worker
        worker.model_runner.reload_weights(weights_iterator=parameters)
        _refresh_tied_head(worker.model_runner.get_model())
        if not self.engine.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache after a weight update; are requests still running?")

    def _sampling_params(self, sampling: SamplingConfig, seed: int, uid: int) -> SamplingParams:
        return SamplingParams(
            n=sampling.n,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=self.max_response_length,
            logprobs=0,
            seed=mix_seed(seed, uid),
            detokenize=False,
        )

    def _collect(self, prompts: PromptBatch, completions: list[CompletionOutput], n: int) -> RolloutBatch:
        repeated = prompts.repeat_interleave(n)
        shape = (len(completions), self.max_response_length)
        responses = torch.full(shape, self.pad_token_id, dtype=torch.int64)
        response_mask = torch.zeros(shape, dtype=torch.int64)
        logprobs = torch.zeros(shape)
        for row, completion in enumerate(completions):
            length = len(completion.token_ids)
            responses[row, :length] = torch.tensor(completion.token_ids)
            response_mask[row, :length] = 1
            logprobs[row, :length] = torch.tensor(_sampled_logprobs(completion))
        metrics, mean_states = self._measure(completions)
        return RolloutBatch(
            input_ids=torch.cat([repeated.input_ids, responses], dim=1),
            attention_mask=torch.cat([repeated.attention_mask, response_mask], dim=1),
            response_mask=response_mask,
            rollout_logprobs=logprobs,
            group_ids=repeated.uid,
            truncated=torch.tensor([completion.finish_reason == "length" for completion in completions]),
            rank_metrics=metrics,
            mean_states=mean_states,
            batch_size=[len(completions)],
        )

    def _measure(self, completions: list[CompletionOutput]) -> tuple[TensorDict, Tensor]:
        """Rank metrics and mean states of finished responses; the states themselves stay in this process."""
        if not self.measures:
            return TensorDict({}, batch_size=[len(completions)]), torch.zeros(len(completions), 0, 0)
        rows = [measured(completion) for completion in completions]
        stacked = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        means = stacked.pop("mean_state")
        return TensorDict(stacked, batch_size=[len(completions)]), means


def mix_seed(seed: int, uid: int) -> int:
    """A 31-bit seed that differs between neighbouring (seed, uid) pairs in all its bits (splitmix64's finaliser).

    vLLM adds the index of a response within its group, so that consecutive results would make groups share streams.
    """
    z = (seed * 0x9E3779B97F4A7C15 + uid + 1) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (z ^ (z >> 31)) >> 33


def _refresh_tied_head(model: nn.Module) -> None:
    """Prepare an output head that shares the embedding's weights anew.

    On CPU vLLM multiplies by a packed copy of a layer's weights and repacks the layers that a reload names; a tied head
    is named by none, and would go on with the copy of the old weights.
    """
    head = getattr(model, "lm_head", None)
    weight = getattr(head, "weight", None)
    owners = [module for module in model.modules() if getattr(module, "weight", None) is weight]
    if weight is not None and len(owners) > 1:
        head.quant_method.process_weights_after_loading(head)


def _sampled_logprobs(completion: CompletionOutput) -> list[float]:
    return [position[token].logprob for token, position in zip(completion.token_ids, completion.logprobs, strict=True)]
