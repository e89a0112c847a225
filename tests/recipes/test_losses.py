"""Policy losses of the recipes, against numbers worked out by hand."""

import math

import pytest
import torch

from tests.kit import ppo_config
from tests.recipes.loss_inputs import loss_inputs
from verl.algorithms.losses import POLICY_LOSSES
from verl.algorithms.losses.per_token import ppo_clip_loss
from verl.algorithms.rollout_correction import rollout_weights
from verl.recipes.confucius3 import side_of_target, targeted_entropy_loss
from verl.recipes.pacs import pacs_loss
from verl.recipes.rover import rover_loss
from verl.recipes.top_entropy import top_entropy_loss, top_entropy_weights


@pytest.mark.parametrize("experiment", ["aipo", "llamarl"])
def test_aipo_gradient_has_the_capped_ratio_to_the_engine(experiment: str):
    config = ppo_config(f"experiment={experiment}")
    actor, correction = config.actor, config.algorithm.rollout_correction
    # Probabilities 0.8 against 0.2 and 0.1 against 0.4: ratios of 4, cut to 2, and 0.25.
    policy, engine = torch.tensor([[0.8, 0.1]]).log().requires_grad_(), torch.tensor([[0.2, 0.4]]).log()
    advantages, mask = torch.tensor([[1.5, -2.0]]), torch.ones(1, 2)
    losses, _ = POLICY_LOSSES[actor.policy_loss](policy, engine, advantages, mask, **actor.loss_options)
    weights, _ = rollout_weights(policy.detach(), engine, mask, correction.rollout_is, **correction.weight_bounds)
    (losses * weights).sum().backward()
    torch.testing.assert_close(policy.grad, torch.tensor([[-3.0, 0.5]]))
    # AIPO's weights are those of the policy as it learns, LlamaRL's of the policy before the step.
    assert actor.bypass_mode == (experiment == "aipo") and not actor.use_kl_loss


@pytest.mark.parametrize(("target", "side"), [(0.5, 1.0), (0.75, -1.0), (0.625, 0.0)])
def test_confucius3_the_entropy_is_drawn_to_the_target(target: float, side: float):
    mask = torch.tensor([[True, True, False], [True, True, False]])
    before = torch.tensor([[0.5, 1.0, 9.0], [0.25, 0.75, 9.0]])  # of four tokens, 0.625
    zeros = torch.zeros(2, 3)
    mini = loss_inputs([[0.0] * 3] * 2, mask.int().tolist(), old_entropy=before)
    found = side_of_target(mini, target=target, coef=0.1)["side"]
    assert found.tolist() == [side, side]
    entropy = torch.full((2, 3), 0.5, requires_grad=True)
    given = {"advantages": zeros + 1, "entropy": entropy, "prepared": {"side": found}}
    inputs = loss_inputs([[0.0] * 3] * 2, mask.int().tolist(), **given)
    losses, _ = targeted_entropy_loss(inputs, target=target, coef=0.1)
    plain, _ = ppo_clip_loss(inputs.logprobs, inputs.old_logprobs, inputs.advantages, mask, 0.2, 0.2)
    torch.testing.assert_close(losses - plain, mask * (0.1 * side * 0.5))
    losses.sum().backward()
    torch.testing.assert_close(entropy.grad, mask * (0.1 * side))


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


# Two prompts, their responses mixed: rewards 1, 0, -2 of the first, of which one is correct; 3 and 1, both correct.
LOGPROBS = [[0.5, 0.5], [2.0, 1.0], [0.0, 0.0], [-1.0, -1.0], [1.0, 9.0]]
MASK = [[1, 1], [1, 1], [1, 1], [1, 1], [1, 0]]
GROUPS = {"group_ids": torch.tensor([7, 3, 7, 7, 3]), "correct": torch.tensor([True, True, False, False, True])}


@pytest.mark.parametrize(("balanced", "weights"), [(True, [1.5, 1.0, 0.75, 0.75, 1.0]), (False, [1.0] * 5)])
def test_pacs_is_the_cross_entropy_of_each_response(balanced: bool, weights: list[float]):
    inputs = loss_inputs(LOGPROBS, MASK, **GROUPS)
    losses, metrics = pacs_loss(inputs, balanced=balanced)
    # Each reward less the mean of the others: 1 - (-1), 0 - (-0.5), -2 - 0.5; 3 - 1, 1 - 3.
    plain = [softplus(-2.0), softplus(-2.0), softplus(0.5), softplus(-2.5), softplus(2.0)]
    expected = torch.tensor([loss * weight for loss, weight in zip(plain, weights, strict=True)])
    torch.testing.assert_close(losses, expected)
    assert metrics["pacs_reward"].tolist() == [1.0, 3.0, 0.0, -2.0, 1.0]
    assert metrics["pacs_agrees"].tolist() == [1.0, 1.0, 0.0, 1.0, 0.0]


def test_pacs_a_response_without_tokens_is_not_in_its_group():
    # The third response, of the first prompt, is rejected: the other two have one label each.
    inputs = loss_inputs(LOGPROBS, [[1, 1], [1, 1], [0, 0], [1, 1], [1, 0]], **GROUPS)
    losses, _ = pacs_loss(inputs, beta=0.5)
    # Rewards 0.5 and -1.
    torch.testing.assert_close(losses[[0, 3]], torch.tensor([softplus(-1.5), softplus(-1.5)]))
    losses[[0, 1, 3, 4]].sum().backward()
    assert inputs.logprobs.grad.isfinite().all() and not inputs.logprobs.grad[2].any()


@pytest.mark.parametrize("said", [[], [7.0, 7.0]], ids=["one turn", "an environment in between"])
def test_rover_is_the_bellman_error_of_each_token(said: list[float]):
    # Q = 2 (0.5, -1); the mean of Q at the second token is 2 (-3 + 4) = 2, and nothing follows it.
    last = 1 + len(said)
    inputs = loss_inputs(
        [[-1.0, *said, -3.0, 0.0]],
        [[1, *[0] * len(said), 1, 0]],
        old_logprobs=torch.tensor([[-1.5, *said, -2.0, 0.0]]),
        advantages=torch.full((1, last + 2), 0.25),
        statistics={"mean_logprob": torch.tensor([[-9.0, *said, -3.0, -7.0]], requires_grad=True)},
        old_statistics={"mean_logprob": torch.tensor([[-5.0, *said, -4.0, 0.0]])},
    )
    losses, metrics = rover_loss(inputs, rho=2.0)
    # (1 - 0.25 - 2)^2 and (-2 - 0.25)^2
    sampled = losses[:, [0, last]]
    torch.testing.assert_close(sampled, torch.tensor([[1.5625, 5.0625]]))
    assert (metrics["rover_q"].item(), metrics["rover_next_value"].item()) == (-1.0, 2.0)
    sampled.sum().backward()
    # 2 rho (Q - target); none goes through the target.
    torch.testing.assert_close(inputs.logprobs.grad, torch.tensor([[-5.0, *[0.0] * len(said), -9.0, 0.0]]))
    assert inputs.statistics["mean_logprob"].grad is None


def test_rover_before_the_first_step_it_is_a_policy_gradient():
    advantages = torch.tensor([[0.5, 0.5], [-1.0, -1.0]])
    mean = {"mean_logprob": torch.tensor([[-3.0, -4.0], [-5.0, -6.0]])}
    options = {"advantages": advantages, "statistics": mean, "old_statistics": mean}
    inputs = loss_inputs([[0.0, 0.0], [0.0, 0.0]], [[1, 1], [1, 1]], **options)
    rover_loss(inputs)[0].sum().backward()
    torch.testing.assert_close(inputs.logprobs.grad, -2 * advantages)


KEPT = [[1, 1, 0], [1, 1, 1]]


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        (0.4, [[0, 2.5, 0], [2.5, 0, 0]]),
        (0.2, [[0, 0, 0], [5, 0, 0]]),
        # A share of 2.05 tokens is 3 of them.
        (0.41, [[0, 5 / 3, 0], [5 / 3, 0, 5 / 3]]),
        (1.0, [[1, 1, 0], [1, 1, 1]]),
    ],
)
def test_tokens_of_highest_entropy_are_kept(ratio: float, expected: list[list[float]]):
    entropy = torch.tensor([[0.1, 2.0, 9.0], [3.0, 0.2, 0.3]])
    mini = loss_inputs([[0.0] * 3] * 2, KEPT, old_entropy=entropy)
    torch.testing.assert_close(top_entropy_weights(mini, ratio)["weight"], torch.tensor(expected).float())
    with pytest.raises(ValueError, match=r"ratio=1.5: must be in \(0, 1\]"):
        top_entropy_weights(mini, 1.5)


def test_mean_over_all_tokens_is_that_over_the_kept():
    weights = {"weight": torch.tensor([[0, 2.5, 0], [2.5, 0, 0]])}
    advantages = torch.tensor([[1.0, 1.0, 1.0], [-2.0, -2.0, -2.0]])
    inputs = loss_inputs([[0.0] * 3] * 2, KEPT, advantages=advantages, prepared=weights)
    losses, metrics = top_entropy_loss(inputs)
    # Ratios are 1: the mean of -1 and 2.
    assert losses[inputs.response_mask].mean().item() == pytest.approx(0.5) and metrics["top_entropy_kept"].item() == 2
    losses.sum().backward()
    torch.testing.assert_close(inputs.logprobs.grad, torch.tensor([[0, -2.5, 0], [5.0, 0, 0]]))
