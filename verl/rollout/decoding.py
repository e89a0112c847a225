"""Decoding with a model of ``transformers`` and its key-value cache.

Legend: B responses of a batch, P prompt length, R longest response, V vocabulary, L layers, D hidden width.
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
    """Responses of one batch; values after the end of a response are undefined."""

    token_ids: Tensor
    """[B, R] int64."""
    logprobs: Tensor
    """[B, R] float32, under the distribution that the token was drawn from."""
    lengths: Tensor
    """[B] int64, tokens of each response, including the one that ended it."""
    ended: Tensor
    """[B] bool, false for a response that was cut at R tokens."""
    states: Tensor | None
    """[B, R, L, D], the hidden states from which each token was drawn."""


class StopStrings:
    """Finds the end of responses whose text holds one of several strings."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> None:
        self.tokenizer = tokenizer
        self.strings = strings
        # A string that has just been completed lies within the last tokens: none has less than a byte of its text, but
        # some room is left for special tokens, which have none.
        self.window = 16 + max(len(string.encode()) for string in strings)

    def matches(self, token_ids: Tensor) -> Tensor:
        """Return which texts of responses [B, t] hold a string, [B] bool on the CPU; none did before its last token."""
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
    """Sample one response to each prompt.

    Args:
        input_ids, attention_mask: [B, P], padded on the left, on the model's device.
        draws: [B, R] float64 on the model's device, uniform in [0, 1): one number decides each token. R is the longest
            response.
        end_tokens: tokens that end a response.
        layers: layers whose states are kept, see :func:`verl.models.forward.record_states`; may be empty.
        stops: strings that end a response.
        temperatures: [T] float32 on the model's device, above 0, for the tokens of every response, the last entry for
            all later ones, in place of the one temperature; None: that.
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
    # What was read so far. In place of padding stands the prompt's last token, which is penalised anyway.
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
    """Divides the logits by the temperature of the token ``step``."""

    def __init__(self, temperatures: Tensor) -> None:
        self.temperatures = temperatures
        self.step = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Divide ``scores`` [B, V]."""
        return scores / self.temperatures[min(self.step, len(self.temperatures) - 1)]


def logits_processors(sampling: SamplingConfig, scale: LogitsProcessor | None = None) -> LogitsProcessorList:
    """Return the processors from logits to the sampled distribution, in vLLM's order.

    Greedy decoding obeys only the repetition penalty. ``scale`` stands in for the temperature.
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
