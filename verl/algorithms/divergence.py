"""Divergences between a student's distribution p and a teacher's distribution q, for distillation.

E is the number of events: either all tokens of the vocabulary, or k tokens and the tail (:func:`top_k_events`).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

SMALLEST_TAIL = 1e-6
"""Smallest probability of a tail that can be told from 0 if the log-probabilities of the other events are rounded to
float32, as a server's are."""

NO_TOKEN = -1
"""Id of an entry without a token, if a server returned fewer than k of the tokenizer's tokens."""

Terms = tuple[Tensor, Tensor]
"""Terms of a divergence and weights w of its gradient, both of shape [..., E]. The sum of the terms over events is the
divergence in nats. The sum of w grad log p is the divergence's gradient with respect to the student's parameters."""


def reverse_kl(student: Tensor, teacher: Tensor, beta: float) -> Terms:
    """Return the terms of KL(p || q), the sum of p (log p - log q), which is large if p has mass where q has little."""
    terms = student.exp() * (student - teacher)
    return terms, terms


def forward_kl(student: Tensor, teacher: Tensor, beta: float) -> Terms:
    """Return the terms of KL(q || p), the sum of q (log q - log p), which is large if q has mass where p has little."""
    q = teacher.exp()
    return q * (teacher - student), student.exp() - q


def jensen_shannon(student: Tensor, teacher: Tensor, beta: float) -> Terms:
    """Return the terms of the generalised Jensen-Shannon divergence (Agarwal et al. 2024, arXiv 2306.13649).

    With m = beta q + (1 - beta) p and 0 < beta < 1, the divergence is beta KL(q || m) + (1 - beta) KL(p || m). It
    approaches beta times the forward KL as beta -> 0, and 1 - beta times the reverse KL as beta -> 1.
    """
    x = student - teacher
    shrunk, below = torch.expm1(-x.abs()), x <= 0
    # log m - log q is log(beta + (1 - beta) exp(x)), and log m - log p is x less. Neither overflows or rounds at x = 0.
    rises = torch.where(below, torch.log1p((1 - beta) * shrunk), x + torch.log1p(beta * shrunk))
    falls = torch.where(below, rises - x, torch.log1p(beta * shrunk))
    of_student = -(1 - beta) * student.exp() * falls
    return of_student - beta * teacher.exp() * rises, of_student


DIVERGENCES: dict[str, Callable[[Tensor, Tensor, float], Terms]] = {
    "reverse_kl": reverse_kl,
    "forward_kl": forward_kl,
    "jsd": jensen_shannon,
}
"""Maps each name in the configuration to its divergence function."""


def divergence(name: str, student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Return the divergence at each position in nats, [...], differentiable in ``student``.

    The gradient uses the weights, because differentiating the formula would add the sum of p grad log p over events,
    which is 0 only up to rounding. If student and teacher are equal, the divergence and its gradient are exactly 0.

    Args:
        name: Key of ``DIVERGENCES``.
        student: Log-probabilities log p of all events, [..., E], whose probabilities sum to 1.
        teacher: Log-probabilities log q of the same events, [..., E], without a gradient.
        beta: Weight of the teacher in the mixture of ``jsd``.
    """
    terms, weights = DIVERGENCES[name](student.detach(), teacher, beta)
    carrier = (weights * student).sum(dim=-1)
    # The difference is exactly 0, so the value is not rounded.
    return (carrier - carrier.detach()) + terms.sum(dim=-1)


def top_k_events(student: Tensor, teacher: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return both models' log-probabilities of the teacher's top k tokens and of the tail, both [..., k + 1].

    The tail combines all other tokens, so the probabilities sum to 1 without renormalisation. By the data processing
    inequality, a divergence over these events never exceeds the divergence over the whole vocabulary.

    Args:
        student, teacher: Log-probabilities of all tokens, [..., V].
        k: Number of tokens, below V.
    """
    ids = teacher.topk(k).indices
    return _with_tail(student, ids), _with_tail(teacher, ids)


def given_top_k_events(student: Tensor, logprobs: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the events of :func:`top_k_events` for a teacher of whom only the top k tokens are known.

    The tail has the probability that the k tokens leave, but at least ``SMALLEST_TAIL``.

    Args:
        student: Log-probabilities of all tokens, [..., V].
        logprobs, ids: The teacher's log-probabilities of its k most likely tokens, and their ids, [..., k] each. If
            fewer are known, the other ids are ``NO_TOKEN``.
    """
    absent = ids == NO_TOKEN
    known = logprobs.double().exp().masked_fill(absent, 0.0).sum(dim=-1, keepdim=True)
    teacher = torch.cat([logprobs, (1 - known).clamp(min=SMALLEST_TAIL).log().to(logprobs.dtype)], dim=-1)
    # Equal values, here 0, add nothing to a divergence or its gradient.
    absent = F.pad(absent, (0, 1))
    return _with_tail(student, ids).masked_fill(absent, 0.0), teacher.masked_fill(absent, 0.0)


def _with_tail(logprobs: Tensor, ids: Tensor) -> Tensor:
    size = logprobs.shape[-1]
    # A column after the last token takes the marks of NO_TOKEN.
    unmarked = torch.zeros(*logprobs.shape[:-1], size + 1, dtype=torch.bool, device=logprobs.device)
    marked = unmarked.scatter(-1, ids.remainder(size + 1), value=True)[..., :size]
    tail = logprobs.masked_fill(marked, -torch.inf).logsumexp(dim=-1, keepdim=True)
    return torch.cat([logprobs.gather(-1, ids.clamp(min=0)), tail], dim=-1)
