"""Samples responses with a ``transformers`` model and its key-value cache.

Legend: B = responses per batch, P = prompt length, R = maximum response length, V = vocabulary, L = layers, D = width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from verl.config.rollout import SamplingConfig
from verl.models.forward import record_states
from verl.models.packing import position_ids
from vllm_patches.draw import draw


@dataclass(frozen=True)
class Decoded:
    """Responses to a batch of prompts. Values past the end of a response are undefined."""

    token_ids: Tensor
    """Tokens of each response, [B, R] int64."""
    logprobs: Tensor
    """Log-probability of each token under the distribution from which it was sampled, [B, R] float32."""
    lengths: Tensor
    """Number of tokens in each response, including its end token, [B] int64."""
    ended: Tensor
    """Whether each response finished rather than being truncated at R tokens, [B] bool."""
    states: Tensor | None
    """Hidden states from which each token was sampled, [B, R, L, D], or None if no layers are recorded."""


class StopStrings:
    """Detector of stop strings in the text of responses."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> None:
        self.tokenizer = tokenizer
        self.strings = strings
        # A newly completed string lies within the last tokens, since a token usually contributes at least one byte of
        # text; the extra tokens leave room for special tokens, which contribute none.
        self.window = 16 + max(len(string.encode()) for string in strings)

    def matches(self, token_ids: Tensor) -> Tensor:
        """Return a bool mask [B], on the CPU, of the responses [B, t] whose last token completes a stop string."""
        tails = token_ids[:, -self.window :].tolist()
        texts = self.tokenizer.batch_decode(tails, skip_special_tokens=True)
        return torch.tensor([any(string in text for string in self.strings) for text in texts], dtype=torch.bool)


@torch.no_grad()
def decode(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor,
    draws: Tensor,
    sampling: SamplingConfig,
    end_tokens: list[int],
    layers: Sequence[int],
    stops: StopStrings | None = None,
    temperatures: Tensor | None = None,
) -> Decoded:
    """Sample one response per prompt.

    Args:
        input_ids, attention_mask: Left-padded prompts [B, P] on the model's device.
        draws: Uniform samples from [0, 1), one per token, [B, R] float64 on the model's device; R is the maximum
            response length.
        end_tokens: Tokens that end a response.
        layers: Layers whose states are recorded; see :func:`verl.models.forward.record_states`. May be empty.
        stops: Strings that end a response.
        temperatures: Temperature for each position in the response, [T] float32 above 0 on the model's device, or None
            to use ``sampling.temperature``. The last entry also applies to all later positions.
    """
    batch_size, num_steps = draws.shape
    device = input_ids.device
    scale = None if temperatures is None else PositionTemperature(temperatures)
    processors: Any = logits_processors(sampling, scale)
    ends = torch.tensor(end_tokens, device=device)
    token_ids = torch.zeros(batch_size, num_steps, dtype=torch.int64, device=device)
    logprobs = torch.zeros(batch_size, num_steps, device=device)
    lengths = torch.full((batch_size,), num_steps, device=device)
    ended = torch.zeros(batch_size, dtype=torch.bool, device=device)
    states: Tensor | None = None
    inputs, mask, positions, cache = input_ids, attention_mask, position_ids(attention_mask), None
    # Tokens read so far. Padding is replaced by the prompt's last token, which is penalized anyway.
    read = torch.where(attention_mask.bool(), input_ids, input_ids[:, -1:])
    for step in range(num_steps):
        with record_states(model, layers) as seen:
            output = model(
                input_ids=inputs,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
        cache = output.past_key_values
        if seen:
            last = torch.stack([layer[:, -1] for layer in seen], dim=1)
            states = last.new_zeros(batch_size, num_steps, *last.shape[1:]) if states is None else states
            states[:, step] = last
        if scale is not None:
            scale.step = step
        distribution = processors(read, output.logits[:, -1].float()).log_softmax(dim=-1)
        greedy = sampling.temperature == 0
        tokens = distribution.argmax(dim=-1) if greedy else draw(distribution.exp(), draws[:, step])
        token_ids[:, step] = tokens
        logprobs[:, step] = distribution.gather(1, tokens[:, None]).squeeze(1)
        ends_here = torch.isin(tokens, ends) & ~ended
        if stops is not None:
            open_rows = (~(ended | ends_here)).nonzero().flatten()
            ends_here[open_rows] = stops.matches(token_ids[open_rows, : step + 1]).to(device)
        lengths = torch.where(ends_here, step + 1, lengths)
        ended |= ends_here
        if ended.all():
            break
        inputs = tokens[:, None]
        read = torch.cat([read, inputs], dim=1)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
        positions = positions[:, -1:] + 1
    return Decoded(token_ids, logprobs, lengths, ended, states)


class PositionTemperature(LogitsProcessor):
    """Logits processor that divides logits by the temperature at the current position, ``step``."""

    def __init__(self, temperatures: Tensor) -> None:
        self.temperatures = temperatures
        self.step = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Divide ``scores`` [B, V] by the current temperature."""
        return scores / self.temperatures[min(self.step, len(self.temperatures) - 1)]


def logits_processors(sampling: SamplingConfig, scale: LogitsProcessor | None = None) -> LogitsProcessorList:
    """Return the logits processors to apply before sampling, in vLLM's order.

    Greedy decoding applies only the repetition penalty. If ``scale`` is not None, it replaces the temperature.
    """
    processors = LogitsProcessorList()
    if sampling.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.temperature > 0:
        if scale is not None:
            processors.append(scale)
        elif sampling.temperature != 1:
            processors.append(TemperatureLogitsWarper(sampling.temperature))
        if sampling.min_p > 0:
            processors.append(MinPLogitsWarper(sampling.min_p))
        if sampling.top_k > 0:
            processors.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            processors.append(TopPLogitsWarper(sampling.top_p))
    return processors
