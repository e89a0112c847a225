"""Gradients of the built-in policy losses: the same for any micro-batches, layout and workers."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conftest import changed
from tests.models import own_losses
from tests.models.models_in_worlds import counts, example
from tests.models.worlds import World
from tests.workers.groups import relative_difference
from verl.algorithms.losses import StepSize
from verl.batch import Batch
from verl.config import PPOConfig
from verl.single_controller.roles import PolicyWorkers, _places

pytestmark = pytest.mark.slow

VARIANTS: dict[str, dict[str, Any]] = {
    "dual clip, tokens reweighed": {"clip_ratio_c": 1.5, "tis_level": "token", "tis_cap": 1.1},
    "gspo, sequence mean": {"policy_loss": "gspo", "loss_agg_mode": "seq-mean-token-mean"},
    "cispo, sequence sum": {"policy_loss": "cispo", "loss_agg_mode": "seq-mean-token-sum", "tis_level": "sequence"},
    "straight-through KL, weighted": {
        "use_kl_loss": True,
        "kl_loss_coef": 1.0,
        "kl_loss_type": "k3+",
        "use_unbiased_kl": True,
    },
    "constant length, entropy": {"loss_agg_mode": "seq-mean-token-sum-norm", "entropy_coeff": 0.01},
}
BY_TOKENS = {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 30, "log_prob_max_token_len_per_gpu": 40}
PACKED = {"use_remove_padding": True, "share_prompts": True}
WHOLE: tuple[int, dict[str, Any], dict[str, Any]] = (1, {}, {"micro_batch_size_per_gpu": 64})
SPLITS = [
    (1, PACKED, {"micro_batch_size_per_gpu": 3, "log_prob_micro_batch_size_per_gpu": 5}),
    (2, {}, {"micro_batch_size_per_gpu": 3}),
    (2, PACKED, BY_TOKENS),
    (4, {}, BY_TOKENS),
]
"""Workers, and the options of model and actor that split the rows."""


@pytest.fixture(scope="module")
def scored(worlds: dict[int, World], small_config: PPOConfig) -> Batch:
    """What the policy says of the example."""
    found: Batch = worlds[1].run(own_losses.score, small_config, example())[0]
    return found


@pytest.fixture(scope="module")
def batch(scored: Batch) -> Batch:
    """Half of the first response, and the whole of the third, are not learned from."""
    rows, generator = example(), torch.Generator().manual_seed(1)
    # Far enough from the old policy for clipping to matter, with a reference near it.
    noise = torch.randn(3, len(scored.logprobs), generator=generator)
    old, reference, engine = scored.logprobs + noise * torch.tensor([[0.3], [0.1], [0.2]])
    learned = rows.padded("learn_mask")
    learned[0, 4:] = learned[2] = False
    return rows.fill(old_logprobs=old, ref_logprobs=reference, rollout_logprobs=engine, learn_mask=learned)


def learn(
    worlds: dict[int, World],
    config: PPOConfig,
    rows: Batch,
    split: tuple[int, dict[str, Any], dict[str, Any]],
    on_policy: bool = False,
) -> tuple[Any, dict[str, Tensor]]:
    """What the first worker returns of an update, and the whole gradient; the rows are dealt as the role deals them."""
    world_size, model, batching = split
    size = StepSize(*counts(rows), rows.width)
    dealer = PolicyWorkers(
        SimpleNamespace(world_size=world_size),
        changed(config, actor={"use_dynamic_bsz": "use_dynamic_bsz" in batching}),
    )
    dealt, order = dealer._to_learn(rows)
    results = worlds[world_size].run(own_losses.learn, config, dealt, size, model, batching, on_policy)
    if on_policy:
        said = Batch.join([found for (_, found), _ in results])
        return said[_places(order)], results[0][1]
    return results[0]


def configured(config: PPOConfig, options: dict[str, Any]) -> PPOConfig:
    return changed(config, actor={"use_kl_loss": False, "optim": {"grad_clip": 1e9}, **options})


@pytest.fixture(scope="module")
def plain(worlds: dict[int, World], small_config: PPOConfig, batch: Batch) -> dict[str, Tensor]:
    return learn(worlds, configured(small_config, {}), batch, WHOLE)[1]


@pytest.mark.parametrize("name", VARIANTS)
def test_gradients_do_not_depend_on_the_split(name: str, worlds, small_config, batch, plain):
    config = configured(small_config, VARIANTS[name])
    metrics, gradients = learn(worlds, config, batch, WHOLE)
    assert relative_difference(plain, gradients) > 1e-3
    for split in SPLITS:
        found, others = learn(worlds, config, batch, split)
        assert relative_difference(gradients, others) < 1e-5, split
        assert found == pytest.approx(metrics, rel=1e-4, abs=1e-6), split
    # One row: the second worker gets a copy of it, from which nothing is learned.
    one = batch[[3]]
    alone, shared = (learn(worlds, config, one, split)[1] for split in (WHOLE, SPLITS[1]))
    assert relative_difference(alone, shared) < 1e-5


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("options", [{"tis_level": "sequence"}, {"policy_loss": "gspo", "entropy_coeff": 0.1}])
def test_the_first_update_needs_no_pass_of_its_own_for_old_log_probabilities(
    options, split, worlds, small_config, batch, scored
):
    config = configured(small_config, options)
    known = batch.without().fill(old_logprobs=scored.logprobs)
    rows = batch.without("old_logprobs")
    _, expected = learn(worlds, config, known, WHOLE)
    said, gradients = learn(worlds, config, rows, split, on_policy=True)
    assert relative_difference(expected, gradients) < 1e-5
    # Of all that was sampled, learned from or not.
    torch.testing.assert_close(said.logprobs, scored.logprobs, atol=1e-5, rtol=0)
    torch.testing.assert_close(said.entropy, scored.entropy, atol=1e-5, rtol=0)
