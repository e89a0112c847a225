"""Chunked output head that computes log-probabilities without keeping the logits of all tokens in memory.

FSDP's hooks on the model's ``forward`` gather the head's weights and reduce their gradients, so the head must run
inside ``forward``. The patched ``forward`` accepts an optional argument ``targets``, the tokens to score.

Shapes: T tokens in the layout (rows flattened), N tokens to score, V vocabulary.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.generic import ModelOutput

from verl.algorithms.divergence import divergence, given_top_k_events, top_k_events
from verl.config.errors import ConfigError
from verl.models.packing import take_tokens


class TeacherLoss(NamedTuple):
    """Distillation loss: a divergence from a teacher's distribution."""

    name: str
    """Key of :data:`verl.algorithms.divergence.DIVERGENCES`."""
    temperature: float
    """Softmax temperature of the student and the teacher."""
    beta: float = 0.5
    """Weight of the teacher in ``jsd``."""
    top_k: int = 0
    """Number of the teacher's most likely tokens to compare, besides the combined tail. 0 compares all tokens."""
    vocabulary: int | None = None
    """Number of token ids to compare, or None to compare all rows of two heads of the same size."""
    is_top_k: bool = False
    """Whether the teacher is given by its top k log-probabilities and ids instead of its logits."""

    def of(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return the divergence in nats at each position, [...] float32.

        Args:
            student: logits, [..., V].
            teacher: logits, [..., V], or the entries of :class:`verl.models.forward.TopKTeacher`, [..., 2 k].
        """
        p = self._distribution(student)
        if self.is_top_k:
            logprobs, ids = teacher.chunk(2, dim=-1)
            return divergence(self.name, *given_top_k_events(p, logprobs, ids.long()), self.beta)
        q = self._distribution(teacher)
        if 0 < self.top_k < q.shape[-1]:
            p, q = top_k_events(p, q, self.top_k)
        return divergence(self.name, p, q, self.beta)

    def _distribution(self, logits: Tensor) -> Tensor:
        return (logits[..., : self.vocabulary].float() / self.temperature).log_softmax(dim=-1)


class Scoring(NamedTuple):
    """Options for the statistics computed from each token's logits."""

    temperature: float
    """Softmax temperature."""
    differentiable_entropy: bool = False
    """Whether gradients flow through the entropy."""
    statistics: tuple[str, ...] = ()
    """Names of additional differentiable statistics, which are keys of ``STATISTICS``."""
    top_k: int = 0
    """Number of tokens k for the statistic ``top_k``."""
    vocabulary: int | None = None
    """Number of token ids that the softmax covers, or None to include the head's entire output."""
    teacher_loss: TeacherLoss | None = None
    """Divergence from a teacher to compute as the differentiable statistic ``teacher_loss``, or None."""


class ScoringTargets(NamedTuple):
    """Tokens to score and their positions."""

    positions: Tensor
    """Index of the token before each target among the T tokens, [N] int64."""
    tokens: Tensor
    """Target token ids, [N] int64."""
    scoring: Scoring
    teacher: tuple[Tensor, Callable[[Tensor], Tensor]] | None = None
    """Inputs of ``scoring.teacher_loss``: the teacher's last hidden states [N, D] at the same positions, and a function
    that returns the teacher's logits [n, V] for such states [n, D], or those of a ``TopKTeacher``."""


def _top_k(_: Tensor, distribution: Tensor, k: int) -> list[Tensor]:
    values, ids = distribution.topk(k)
    return [*values.unbind(dim=-1), *ids.float().unbind(dim=-1)]  # float32 is exact for integers up to 2^24.


STATISTICS: dict[str, Callable[[Tensor, Tensor, int], list[Tensor]]] = {
    "logsumexp": lambda scaled, *_: [scaled.logsumexp(dim=-1)],
    "mean_logprob": lambda _, distribution, __: [distribution.mean(dim=-1)],
    "sum_pi_squared": lambda _, distribution, __: [(2 * distribution).exp().sum(dim=-1)],
    "top_k": _top_k,
}
"""Functions that compute each statistic from logits / temperature [..., V], their log-softmax [..., V], and k.
``top_k`` returns 2 k columns [...]: log-probabilities, then ids of the k most likely tokens. All others return one."""


def logprobs_and_entropy(
    logits: Tensor, tokens: Tensor, scoring: Scoring, teacher: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Return log-probabilities of ``tokens [...]`` and entropies, both in nats, from logits [..., V].

    The tuple continues with the columns of ``scoring.statistics`` and, if the teacher's logits ``teacher [..., V]`` are
    passed, ``scoring.teacher_loss``. All tensors are [...] float32.
    """
    scaled = logits[..., : scoring.vocabulary].float() / scoring.temperature
    distribution = scaled.log_softmax(dim=-1)
    if "logsumexp" not in scoring.statistics:
        scaled = logits  # Free the scaled logits, which no other statistic needs.
    logprobs = distribution.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    with torch.set_grad_enabled(scoring.differentiable_entropy and torch.is_grad_enabled()):
        entropy = -(distribution.exp() * distribution).sum(dim=-1)
    further = (STATISTICS[name](scaled, distribution, scoring.top_k) for name in scoring.statistics)
    columns = [column for columns in further for column in columns]
    if teacher is not None:
        assert scoring.teacher_loss is not None, "a teacher is read only for a loss"
        columns.append(scoring.teacher_loss.of(logits, teacher))
    return logprobs, entropy, *columns


def by_statistic(columns: Sequence[Tensor], scoring: Scoring) -> dict[str, Tensor]:
    """Return the columns [...] that :func:`logprobs_and_entropy` returns after the entropy, keyed by name.

    ``top_k`` becomes ``top_k_logprobs`` and ``top_k_ids`` (int64), both [..., k] with the most likely token first.
    """
    named, rest, k = dict[str, Tensor](), list(columns), scoring.top_k
    for name in scoring.statistics:
        if name == "top_k":
            named["top_k_logprobs"] = torch.stack(rest[:k], dim=-1)
            named["top_k_ids"] = torch.stack(rest[k : 2 * k], dim=-1).detach().long()
            del rest[: 2 * k]
        else:
            named[name] = rest.pop(0)
    if scoring.teacher_loss is not None:
        named["teacher_loss"] = rest.pop(0)
    return named


def compute_logits_in_float32(model: PreTrainedModel) -> None:
    """Patch the output head of a causal language model to compute in float32."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        kind = type(model).__name__
        raise ConfigError(f"model.logits_dtype='float32': the output head of {kind} is not linear; set it to auto")

    def forward(states: Tensor) -> Tensor:
        bias = None if head.bias is None else head.bias.float()
        return F.linear(states.float(), head.weight.float(), bias)

    head.forward = forward  # type: ignore[method-assign, assignment]


def chunk_output_head(model: PreTrainedModel, chunk_size: int) -> None:
    """Patch ``forward`` of a causal language model to score ``targets`` with :func:`logprobs_and_entropy`.

    The logits of at most ``chunk_size`` tokens are in memory at a time, and the backward pass recomputes them. The
    logits come from the model's own ``forward``, which may scale or cap them.

    With ``positions [N]`` instead of ``targets``, ``forward`` returns the last hidden states [N, D] at these positions.
    With ``states [N, D]``, it returns their logits [N, V], which another model's loss can use in chunks.
    """
    original = model.forward
    decoder = getattr(model, model.base_model_prefix)
    kind: type[ModelOutput] = BaseModelOutputWithPast  # type of the decoder's last output

    def logits_of(states: Tensor) -> Tensor:
        # An entry in the instance's dictionary shadows the registered submodule.
        model.__dict__[model.base_model_prefix] = _PrecomputedDecoder(decoder, kind)
        try:
            logits: Tensor = original(inputs_embeds=states[None], use_cache=False).logits[0]
        finally:
            del model.__dict__[model.base_model_prefix]
        return logits

    # Preserve the signature, because generation inspects it.
    @functools.wraps(original)
    def forward(
        *args: Any,
        targets: ScoringTargets | None = None,
        positions: Tensor | None = None,
        states: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        nonlocal kind
        if states is not None:
            return logits_of(states)
        if targets is None and positions is None:
            return original(*args, **kwargs)
        # Run the model without the head.
        decoded = decoder(*args, **{name: value for name, value in kwargs.items() if value is not None})
        hidden, kind = decoded.last_hidden_state.flatten(0, 1), type(decoded)
        del decoded
        if positions is not None:
            return take_tokens(hidden, positions)
        assert targets is not None, "without targets there are positions"
        hidden, sources = take_tokens(hidden, targets.positions), targets.teacher

        def score(states: Tensor, tokens: Tensor, *teacher_states: Tensor) -> tuple[Tensor, ...]:
            teacher = None if sources is None else sources[1](*teacher_states)
            return logprobs_and_entropy(logits_of(states), tokens, targets.scoring, teacher)

        columns = [hidden, targets.tokens, *(() if sources is None else sources[:1])]
        chunks = zip(*(column.split(chunk_size) for column in columns), strict=True)
        scored = [checkpoint(score, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
        return tuple(torch.cat(parts) for parts in zip(*scored, strict=True))

    model.forward = forward


class _PrecomputedDecoder:
    """Decoder replacement that returns its input embeddings as the last hidden states.

    Attribute access is forwarded to the decoder, because a model's ``forward`` may read its attributes.
    """

    def __init__(self, decoder: nn.Module, output_type: type[ModelOutput]) -> None:
        """Wrap ``decoder``, whose outputs are of type ``output_type``."""
        self.decoder = decoder
        self.output_type = output_type

    def __call__(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> ModelOutput:
        return self.output_type(last_hidden_state=inputs_embeds)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.decoder, name)
