"""One forward pass: log-probabilities of given tokens or one number per token, over as few columns as rows need.

Legend: B rows, S columns, R response columns, V vocabulary.
"""

import torch
from torch import Tensor, nn


def trim_columns(input_ids: Tensor, attention_mask: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cut the columns that are padding in every row, left of the prompts and right of the responses.

    Args:
        input_ids, attention_mask: [B, S].
        response_mask: [B, R], the last R columns of the S.
    """
    used = attention_mask.any(dim=0).nonzero()
    first, last = int(used[0]), int(used[-1]) + 1
    cut = attention_mask.shape[1] - last
    num_response = response_mask.shape[1]
    return input_ids[:, first:last], attention_mask[:, first:last], response_mask[:, : num_response - cut]


def position_ids(attention_mask: Tensor) -> Tensor:
    """[B, S] positions that count real tokens alone, so that left padding does not shift a row."""
    return (attention_mask.cumsum(dim=1) - 1).clamp(min=0)


def token_logprobs(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor,
    num_last: int,
    temperature: float,
    differentiable_entropy: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each of the last ``num_last`` tokens of every row, and the entropy it was drawn with.

    Args:
        model: a causal language model of ``transformers``.
        input_ids, attention_mask: [B, S].
        num_last: number of final columns to score, below S.
        temperature: softmax temperature of the policy.
        differentiable_entropy: whether the entropy carries a gradient, which takes another [B, num_last, V] of memory.

    Returns:
        logprobs [B, num_last] float32, entropy in nats [B, num_last] float32.
    """
    logits = model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids(attention_mask),
        use_cache=False,
        logits_to_keep=num_last + 1,
    ).logits[:, :-1]
    distribution = (logits.float() / temperature).log_softmax(dim=-1)
    targets = input_ids[:, -num_last:].unsqueeze(-1)
    logprobs = distribution.gather(-1, targets).squeeze(-1)
    with torch.set_grad_enabled(differentiable_entropy and torch.is_grad_enabled()):
        entropy = -(distribution.exp() * distribution).sum(dim=-1)
    return logprobs, entropy


def token_values(model: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """The number that a value model gives after each token has been read, [B, S] float32.

    Args:
        model: a token classification model of ``transformers`` with one label.
        input_ids, attention_mask: [B, S].
    """
    logits: Tensor = model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids(attention_mask),
        use_cache=False,
    ).logits
    return logits.squeeze(-1).float()
