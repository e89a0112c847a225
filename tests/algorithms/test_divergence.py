"""Divergences from a teacher, against loops over the vocabulary in float64."""

import math

import pytest
import torch
from torch import Tensor

from verl.algorithms.divergence import DIVERGENCES, divergence, top_k_events

NAMES = list(DIVERGENCES)


@pytest.fixture
def logits() -> tuple[Tensor, Tensor]:
    """Logits of student and teacher at 6 positions, [6, 600] float64, from states of width 64."""
    generator = torch.Generator().manual_seed(0)
    states, heads = torch.randn(2, 6, 64, generator=generator), torch.randn(2, 64, 600, generator=generator) / 4
    student, teacher = (states @ heads).double()
    return student.requires_grad_(), teacher


def by_loop(name: str, p: Tensor, q: Tensor, beta: float) -> Tensor:
    """Return the definition, one event at a time, from probabilities [E]."""
    total = torch.zeros((), dtype=torch.float64)
    for a, b in zip(p.unbind(), q.unbind(), strict=True):
        m = beta * b + (1 - beta) * a
        total = (
            total
            + {
                "reverse_kl": a * (a / b).log(),
                "forward_kl": b * (b / a).log(),
                "jsd": beta * b * (b / m).log() + (1 - beta) * a * (a / m).log(),
            }[name]
        )
    return total


def events(p: Tensor, q: Tensor, k: int) -> list[Tensor]:
    """Return the probabilities of the teacher's k most likely tokens, and what is left."""
    chosen = sorted(range(len(q)), key=lambda i: -q[i].item())[:k]
    return [torch.stack([*(x[i] for i in chosen), 1 - sum(x[i] for i in chosen)]) for x in (p, q)]


@pytest.mark.parametrize("k", [0, 1, 20])
@pytest.mark.parametrize("beta", [0.1, 0.5])
@pytest.mark.parametrize("name", NAMES)
def test_values_and_gradients_match_loops(name: str, beta: float, k: int, logits):
    student, teacher = logits
    expected = []
    for a, b in zip(student.softmax(dim=1), teacher.softmax(dim=1), strict=True):
        expected.append(by_loop(name, *(events(a, b, k) if k else (a, b)), beta))
    (reference,) = torch.autograd.grad(torch.stack(expected).square().sum(), student)

    p, q = student.log_softmax(dim=1), teacher.log_softmax(dim=1)
    values = divergence(name, *(top_k_events(p, q, k) if k else (p, q)), beta)
    (gradient,) = torch.autograd.grad(values.square().sum(), student)
    torch.testing.assert_close(values.detach(), torch.stack(expected).detach(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(gradient, reference, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("k", [0, 7])
@pytest.mark.parametrize("name", NAMES)
def test_student_that_equals_its_teacher_has_no_gradient(name: str, k: int, logits):
    student = logits[0].detach().float().requires_grad_()
    p, q = student.log_softmax(dim=1), student.detach().log_softmax(dim=1)
    values = divergence(name, *(top_k_events(p, q, k) if k else (p, q)), 0.3)
    values.sum().backward()
    assert not values.detach().any() and not student.grad.any()


@pytest.mark.parametrize("name", NAMES)
def test_fewer_events_diverge_less(name: str, logits):
    p, q = (values.detach().log_softmax(dim=1) for values in logits)
    found = [divergence(name, *top_k_events(p, q, k), 0.5) for k in (1, 5, 50, 599)]
    found.append(divergence(name, p, q, 0.5))
    for fewer, more in zip(found, found[1:], strict=False):
        assert (fewer <= more + 1e-12).all()
    torch.testing.assert_close(found[-2], found[-1])  # the tail of 599 is the last token


def test_sampled_form_is_the_exact_one_in_expectation(logits):
    student, teacher = logits
    p, q = student.log_softmax(dim=1), teacher.log_softmax(dim=1)
    (exact,) = torch.autograd.grad(divergence("reverse_kl", p, q, 0.5).sum(), student, retain_graph=True)
    advantages = (q - p).detach()
    (sampled,) = torch.autograd.grad(-(p.detach().exp() * advantages * p).sum(), student)
    torch.testing.assert_close(sampled, exact)


def test_jensen_shannon_tends_to_both_kl_divergences(logits):
    p, q = (values.detach().log_softmax(dim=1) for values in logits)
    small = 1e-6
    forward = divergence("jsd", p, q, small) / small
    reverse = divergence("jsd", p, q, 1 - small) / small
    torch.testing.assert_close(forward, divergence("forward_kl", p, q, 0.5), rtol=1e-3, atol=0)
    torch.testing.assert_close(reverse, divergence("reverse_kl", p, q, 0.5), rtol=1e-3, atol=0)


@pytest.mark.parametrize(("name", "expected"), [("reverse_kl", 2e4), ("forward_kl", 2e4), ("jsd", math.log(2))])
def test_disjoint_distributions_have_finite_divergences(name: str, expected: float):
    student = torch.tensor([[1e4, -1e4]], requires_grad=True)
    p, q = student.log_softmax(dim=1), torch.tensor([[-1e4, 1e4]]).log_softmax(dim=1)
    value = divergence(name, p, q, 0.5)
    value.sum().backward()
    assert value.item() == pytest.approx(expected) and student.grad.isfinite().all()
