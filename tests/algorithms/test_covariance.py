import torch

from verl.algorithms.losses import clip_cov_loss, kl_cov_loss
from verl.algorithms.losses.covariance import covariances

# Means over the mask: advantages 0, log-probabilities -2.
ADVANTAGES = torch.tensor([[2.0, -2.0, 1.0], [-1.0, 9.0, 9.0]], dtype=torch.float64)
LOGPROBS = torch.tensor([[-1.0, -3.5, -0.5], [-3.0, 9.0, 9.0]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1], [1, 0, 0]])
COVARIANCES = [[2.0, 3.0, 1.5], [1.0, 0.0, 0.0]]


def test_covariances():
    assert covariances(LOGPROBS, ADVANTAGES, MASK.bool()).tolist() == COVARIANCES


def test_some_tokens_between_the_bounds_learn_nothing():
    logprobs = LOGPROBS.clone().requires_grad_()
    old = LOGPROBS.clone()
    old[0, 1] += 1.0  # its ratio falls below the clip, where a negative advantage has no say
    losses, metrics = clip_cov_loss(logprobs, old, ADVANTAGES, MASK, 0.2, 0.2, 0.5, 1.4, 5.0)
    # Half of four tokens: of the first, second and third the second is clipped already.
    assert losses[0, [0, 2]].tolist() == [0.0, 0.0] and losses[1].tolist() == [1.0, 0.0, 0.0]
    torch.testing.assert_close(losses[0, 1].item(), 1.6)
    assert (metrics["pg_clipfrac"].item(), metrics["num_tokens"].item()) == (2, 4)
    losses.sum().backward()
    assert logprobs.grad.tolist() == [[0.0, 0.0, 0.0], [1.0, 0.0, 0.0]]
    # At least one is drawn, the same again, and another where the numbers differ.
    for low, number in ((1.4, 1), (2.5, 0)):
        options = (0.2, 0.2, 1e-4, low, 5.0)
        first, again = (clip_cov_loss(LOGPROBS, old, ADVANTAGES, MASK, *options) for _ in range(2))
        assert first[1]["pg_clipfrac"].item() == number and torch.equal(first[0], again[0])
    # The second's is above the upper bound.
    losses, _ = clip_cov_loss(LOGPROBS, LOGPROBS, ADVANTAGES, MASK, 0.2, 0.2, 1.0, 1.4, 2.5)
    assert losses.tolist() == [[0.0, 2.0, 0.0], [1.0, 0.0, 0.0]]
    drawn = set()
    for step in range(20):
        changed = LOGPROBS * (1 + 1e-3 * step)
        losses, _ = clip_cov_loss(changed, changed, ADVANTAGES, MASK, 0.2, 0.2, 1e-4, 1.4, 5.0)
        drawn |= set((losses[0] == 0).nonzero().flatten().tolist())
    assert drawn == {0, 1, 2}


def test_the_draw_ignores_padding_masked_rows_and_rounding():
    generator = torch.Generator().manual_seed(0)
    logprobs, advantages = torch.randn(4, 50, generator=generator) - 2, torch.randn(4, 50, generator=generator)
    old, mask = logprobs.clone(), torch.ones(4, 50)
    options = (0.2, 0.2, 0.1, -9.0, 9.0)
    losses, metrics = clip_cov_loss(logprobs, old, advantages, mask, *options)
    assert metrics["pg_clipfrac"].item() == 20
    copies = [torch.nn.functional.pad(torch.cat([t, t[:2]]), (0, 3)) for t in (logprobs, old, advantages, mask)]
    copies[3][4:] = 0
    for given in ([logprobs * (1 + 1e-6), old, advantages, mask], copies):
        found, _ = clip_cov_loss(*given, *options)
        assert torch.equal(found[:4, :50] == 0, losses == 0)


def test_the_tokens_of_largest_covariance_are_penalised():
    logprobs = LOGPROBS.clone().requires_grad_()
    old = LOGPROBS - torch.tensor([[2.0, 0.5, 2.0], [1.0, 1.0, 1.0]], dtype=torch.float64).log()
    losses, metrics = kl_cov_loss(logprobs, old, ADVANTAGES, MASK, 0.5, 3.0)
    log2 = torch.tensor(2.0, dtype=torch.float64).log().item()
    expected = torch.tensor([[-4 + 3 * log2, 1 + 3 * log2, -2], [1, 0, 0]], dtype=torch.float64)
    torch.testing.assert_close(losses.detach(), expected)
    losses.sum().backward()
    slopes = torch.tensor([[-4 + 3.0, 1 - 3.0, -2], [1, 0, 0]], dtype=torch.float64)
    torch.testing.assert_close(logprobs.grad, slopes)
    assert metrics["num_tokens"].item() == 4
    nothing, _ = kl_cov_loss(LOGPROBS, old, ADVANTAGES, 0 * MASK, 0.5, 3.0)
    assert nothing.abs().sum() == 0
