"""The output head in chunks: log-probabilities without the logits of all tokens.

FSDP's hooks on the model's ``forward`` gather the head's weights and reduce their gradients: the head must run inside
it. A model therefore gets a ``forward`` that scores tokens when it is given targets, and is unchanged otherwise.

Legend: T tokens as the model reads them (rows flattened), N of them to score, V vocabulary.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from verl.config.errors import ConfigError


class Scoring(NamedTuple):
    """Statistics of a token's logits."""

    temperature: float
    """Softmax temperature."""
    differentiable_entropy: bool = False
    """Whether the entropy carries a gradient."""
    statistics: tuple[str, ...] = ()
    """Names in ``STATISTICS`` of what is wanted of the distribution, too, with a gradient."""
    top_k: int = 0
    """How many tokens ``top_k`` names."""


class ScoringTargets(NamedTuple):
    """The tokens to score."""

    positions: Tensor
    """[N] int64, the tokens of the T that each target follows."""
    tokens: Tensor
    """[N] int64, the targets."""
    scoring: Scoring


def _top_k(_: Tensor, distribution: Tensor, k: int) -> list[Tensor]:
    values, ids = distribution.topk(k)
    return [*values.unbind(dim=-1), *ids.float().unbind(dim=-1)]  # float32 holds integers up to 2^24 as they are


STATISTICS: dict[str, Callable[[Tensor, Tensor, int], list[Tensor]]] = {
    "logsumexp": lambda scaled, *_: [scaled.logsumexp(dim=-1)],
    "mean_logprob": lambda _, distribution, __: [distribution.mean(dim=-1)],
    "sum_pi_squared": lambda _, distribution, __: [(2 * distribution).exp().sum(dim=-1)],
    "top_k": _top_k,
}
"""Name -> f(logits over temperature, their log-softmax, both [..., V], k) -> columns [...]: the logarithm of the sum of
exponentials, the mean of all V log-probabilities, the sum of the squares of all V probabilities, and the
log-probabilities of the k most likely tokens followed by these tokens. One column each, but 2 k of ``top_k``."""


def logprobs_and_entropy(logits: Tensor, tokens: Tensor, scoring: Scoring) -> tuple[Tensor, ...]:
    """Log-probabilities of ``tokens [...]`` and entropies in nats [...], float32, from logits [..., V].

    Behind them the columns of ``scoring.statistics``, [...] each.
    """
    scaled = logits.float() / scoring.temperature
    distribution = scaled.log_softmax(dim=-1)
    if "logsumexp" not in scoring.statistics:
        scaled = logits  # which nothing else reads: that frees as many numbers as there are logits
    logprobs = distribution.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    with torch.set_grad_enabled(scoring.differentiable_entropy and torch.is_grad_enabled()):
        entropy = -(distribution.exp() * distribution).sum(dim=-1)
    further = (STATISTICS[name](scaled, distribution, scoring.top_k) for name in scoring.statistics)
    return logprobs, entropy, *(column for columns in further for column in columns)


def by_statistic(columns: Sequence[Tensor], scoring: Scoring) -> dict[str, Tensor]:
    """Return the statistics that :func:`logprobs_and_entropy` returns after the entropy, by name: [...].

    ``top_k`` gives both ``top_k_logprobs`` and ``top_k_ids`` (int64), [..., k], likeliest first.
    """
    named, rest, k = dict[str, Tensor](), list(columns), scoring.top_k
    for name in scoring.statistics:
        if name == "top_k":
            named["top_k_logprobs"] = torch.stack(rest[:k], dim=-1)
            named["top_k_ids"] = torch.stack(rest[k : 2 * k], dim=-1).detach().long()
            del rest[: 2 * k]
        else:
            named[name] = rest.pop(0)
    return named


def compute_logits_in_float32(model: PreTrainedModel) -> None:
    """Let the output head of a causal language model multiply in float32, whatever its weights and states are in."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        kind = type(model).__name__
        raise ConfigError(f"model.logits_dtype='float32': the output head of {kind} is not linear; set it to auto")

    def forward(states: Tensor) -> Tensor:
        bias = None if head.bias is None else head.bias.float()
        return F.linear(states.float(), head.weight.float(), bias)

    head.forward = forward  # type: ignore[method-assign, assignment]  # of this instance alone


def chunk_output_head(model: PreTrainedModel, chunk_size: int) -> None:
    """Give a causal language model a ``forward`` that, given ``targets``, scores them by :func:`logprobs_and_entropy`.

    Logits of at most ``chunk_size`` tokens exist at a time, in the backward pass too, which computes them again. They
    are the model's own, with all that its ``forward`` does to them (scales, soft caps).
    """
    original = model.forward

    # The signature stays that of the model's class, which generation reads.
    @functools.wraps(original)
    def forward(*args: Any, targets: ScoringTargets | None = None, **kwargs: Any) -> Any:
        if targets is None:
            return original(*args, **kwargs)
        # All of the model but the head.
        decoder = getattr(model, model.base_model_prefix)
        given = {name: value for name, value in kwargs.items() if value is not None}
        decoded = decoder(*args, **given)
        states, kind = decoded.last_hidden_state.flatten(0, 1)[targets.positions], type(decoded)
        del decoded

        def score(states: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
            with _submodule_replaced(model, model.base_model_prefix, _PrecomputedDecoder(decoder, kind)):
                logits = original(inputs_embeds=states[None], use_cache=False).logits[0]
            return logprobs_and_entropy(logits, tokens, targets.scoring)

        chunks = zip(states.split(chunk_size), targets.tokens.split(chunk_size), strict=True)
        scored = [checkpoint(score, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
        return tuple(torch.cat(parts) for parts in zip(*scored, strict=True))

    model.forward = forward


class _PrecomputedDecoder:
    """A decoder that has already run: it returns what it is given as input embeddings.

    Its attributes are the decoder's, because a model's ``forward`` may read more from it than states.
    """

    def __init__(self, decoder: nn.Module, kind: type[ModelOutput]) -> None:
        """``kind``: what the decoder returns."""
        self.decoder = decoder
        self.kind = kind

    def __call__(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> ModelOutput:
        return self.kind(last_hidden_state=inputs_embeds)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.decoder, name)


@contextmanager
def _submodule_replaced(module: nn.Module, name: str, value: Any) -> Iterator[None]:
    """Replace the submodule ``name`` of ``module`` by ``value`` inside the block."""
    # In the instance's own dictionary, which comes before submodules: these stay as they are.
    module.__dict__[name] = value
    try:
        yield
    finally:
        del module.__dict__[name]
