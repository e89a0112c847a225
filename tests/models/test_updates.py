"""Gradients of policy losses, built in or as users write them: the same for any micro-batches, layout and workers, and
for users' own those of float64."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.kit import changed, user_code
from tests.models import own_losses
from tests.models.models_in_worlds import counts, example
from tests.models.worlds import World
from tests.workers.groups import relative_difference
from verl.algorithms.losses import BatchSize
from verl.batch import Batch
from verl.config import PPOConfig
from verl.single_controller.roles import PolicyWorkers, inverse
from verl.workers.policy_loss import CustomLoss

pytestmark = pytest.mark.slow

STRAIGHT_THROUGH = {"use_kl_loss": True, "kl_loss_coef": 1.0, "kl_loss_type": "k3+", "use_unbiased_kl": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "dual clip, tokens reweighed": {"clip_ratio_c": 1.5, "rollout_is": "token", "rollout_is_threshold": 1.1},
    "gspo, sequence mean": {"policy_loss": "gspo", "loss_agg_mode": "seq-mean-token-mean"},
    "cispo, sequence sum": {"policy_loss": "cispo", "loss_agg_mode": "seq-mean-token-sum", "rollout_is": "sequence"},
    "straight-through KL, weighted": STRAIGHT_THROUGH,
    "constant length, entropy": {"loss_agg_mode": "seq-mean-token-sum-norm", "entropy_coeff": 0.01},
}
LOSSES = {
    "everything": f"{own_losses.__file__}:everything",
    "of_one_response": "tests.models.own_losses:of_one_response",
    "pacs": "verl.recipes.pacs:pacs_loss",
}
BY_TOKENS = {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 30, "log_prob_max_token_len_per_gpu": 40}
BY_GROUPS = BY_TOKENS | {"ppo_max_token_len_per_gpu": 44}
PACKED = {"use_remove_padding": True, "share_prompts": True}
SHARED = {"use_remove_padding": True, "ulysses_sequence_parallel_size": 2}
Split = tuple[int, dict[str, Any], dict[str, Any]]
"""Workers, and the options of model and actor that split the rows."""
WHOLE: Split = (1, {}, {"micro_batch_size_per_gpu": 64})
SPLITS: list[Split] = [
    (1, PACKED, {"micro_batch_size_per_gpu": 3, "log_prob_micro_batch_size_per_gpu": 5}),
    (2, {}, {"micro_batch_size_per_gpu": 3}),
    (2, PACKED, BY_TOKENS),
    (4, {}, BY_TOKENS),
]
OWN_SPLITS: list[Split] = [
    (1, {"logits_chunk_size": 0}, {"micro_batch_size_per_gpu": 64}),
    (1, {"use_remove_padding": True}, {"micro_batch_size_per_gpu": 4}),
    (2, {}, BY_GROUPS),
    # One of them has copies alone, where groups stay together.
    (4, {}, {"micro_batch_size_per_gpu": 3}),
    (4, SHARED, BY_GROUPS),
]


def configured(config: PPOConfig, options: dict[str, Any]) -> PPOConfig:
    """With gradients as they are."""
    weights = {name: value for name, value in options.items() if name.startswith("rollout_is")}
    others = {name: value for name, value in options.items() if name not in weights}
    actor = {"use_kl_loss": False, "optim": {"grad_clip": 1e9}, **others}
    algorithm = {"rollout_correction": weights}
    return changed(config, actor=actor, algorithm=algorithm, trainer={"n_gpus_per_node": 4})


def sizes(batch: Batch) -> BatchSize:
    return BatchSize(*counts(batch), batch.width)


def learn(
    worlds: dict[int, World], config: PPOConfig, rows: Batch, split: Split, on_policy: bool = False
) -> list[tuple[Any, dict[str, Tensor]]]:
    """What each worker returns of an update, and the whole gradient; the rows are dealt as the role deals them.

    With ``on_policy`` the first worker returns what all say of the rows.
    """
    world_size, model, batching = split
    actor = {"use_dynamic_bsz": "use_dynamic_bsz" in batching}
    dealt_as = changed(config, model=model, actor=actor)
    whole_groups = CustomLoss(config.actor).needs.whole_groups
    dealt, order = PolicyWorkers(SimpleNamespace(world_size=world_size), dealt_as, whole_groups)._to_learn(rows)
    results = worlds[world_size].run(own_losses.learn, config, dealt, sizes(rows), model, batching, on_policy)
    if on_policy:
        said = Batch.join([found for (_, found), _ in results])
        return [(said[inverse(order)], results[0][1])]
    return results


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


@pytest.fixture(scope="module")
def plain(worlds: dict[int, World], small_config: PPOConfig, batch: Batch) -> dict[str, Tensor]:
    return learn(worlds, configured(small_config, {}), batch, WHOLE)[0][1]


@pytest.mark.parametrize("name", VARIANTS)
def test_gradients_do_not_depend_on_the_split(name: str, worlds, small_config, batch, plain):
    config = configured(small_config, VARIANTS[name])
    ((metrics, gradients),) = learn(worlds, config, batch, WHOLE)
    assert relative_difference(plain, gradients) > 1e-3
    for split in SPLITS:
        found, others = learn(worlds, config, batch, split)[0]
        assert relative_difference(gradients, others) < 1e-5, split
        assert found == pytest.approx(metrics, rel=1e-4, abs=1e-6), split
    # One row: the second worker gets a copy of it, from which nothing is learned.
    one = batch[[3]]
    alone, shared = (learn(worlds, config, one, split)[0][1] for split in (WHOLE, SPLITS[1]))
    assert relative_difference(alone, shared) < 1e-5


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("options", [{"rollout_is": "sequence"}, {"policy_loss": "gspo", "entropy_coeff": 0.1}])
def test_first_update_scores_old_logprobs_itself(options, split, worlds, small_config, batch, scored):
    config = configured(small_config, options)
    known = batch.without().fill(old_logprobs=scored.logprobs)
    rows = batch.without("old_logprobs")
    ((_, expected),) = learn(worlds, config, known, WHOLE)
    ((said, gradients),) = learn(worlds, config, rows, split, on_policy=True)
    assert relative_difference(expected, gradients) < 1e-5
    # Of all that was sampled, learned from or not.
    torch.testing.assert_close(said.logprobs, scored.logprobs, atol=1e-5, rtol=0)
    torch.testing.assert_close(said.entropy, scored.entropy, atol=1e-5, rtol=0)


@pytest.fixture(scope="module")
def full_batch() -> Batch:
    """The example, with every column that there is."""
    rows, generator = example(), torch.Generator().manual_seed(1)
    tokens = torch.rand(4, len(rows.advantages), generator=generator)
    rows.fill(**dict(zip(own_losses.OLD_STATISTICS, tokens, strict=False)), entropy=tokens[3])
    rows.fill(scores=torch.rand(8, generator=generator), rewards=torch.arange(8.0), correct=torch.arange(8) % 3 == 0)
    return rows.fill(group=torch.tensor([5, 2, 9, 5, 2, 9, 9, 5]))


def in_float64(config: PPOConfig, batch: Batch) -> tuple[float, dict[str, float], dict[str, Tensor]]:
    """The loss, the metrics, and the gradients of the whole mini-batch at once, from the logits of whole rows."""
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float64)
    loss, size = CustomLoss(config.actor), sizes(batch)
    logits = []
    for row in batch.split(1):
        length = row.longest_response
        logits.append(model(row.tokens[None]).logits[0, -length - 1 : -1] / 0.8)
    kept = torch.cat(logits)
    every = kept.log_softmax(dim=1)
    likely, ids = every.topk(3)
    said = batch.columns().fill(
        logprobs=every.gather(1, batch.response_tokens[:, None])[:, 0],
        entropy=-(every.exp() * every).sum(dim=1),
        logsumexp=kept.logsumexp(dim=1),
        mean_logprob=every.mean(dim=1),
        sum_pi_squared=every.exp().square().sum(dim=1),
        top_k_logprobs=likely,
        top_k_ids=ids,
    )
    doubled = batch.columns()
    for name in batch.names:
        values = getattr(batch, name)
        doubled.fill(**{name: values.double() if values.is_floating_point() else values})
    inputs = loss.inputs(doubled, size, said)
    losses, metrics = loss.losses(inputs)
    mask = inputs.response_mask
    mean = losses[mask].mean() if losses.dim() == 2 else losses[mask.any(dim=1)].mean()
    mean.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return mean.item(), {name: value.item() / size.num_tokens for name, value in metrics.items()}, gradients


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_match_a_whole_float64_mini_batch(name: str, worlds, small_config, full_batch):
    config = configured(small_config, {"policy_loss": LOSSES[name], "loss_agg_mode": "token-mean"})
    prepared = CustomLoss(config.actor).prepared(full_batch, sizes(full_batch))
    expected, metrics, gradients = in_float64(config, prepared)
    for split in OWN_SPLITS:
        for logged, found in learn(worlds, config, prepared, split):
            assert relative_difference(gradients, found) < 5e-6, split
            assert logged["actor/pg_loss"] == pytest.approx(expected, rel=1e-4), split
            assert {key: logged[f"actor/{key}"] for key in metrics} == pytest.approx(metrics, rel=1e-4), split


def test_loss_by_response_takes_entropy_and_aggregation(worlds, small_config, full_batch):
    options = {"policy_loss": LOSSES["of_one_response"], "loss_agg_mode": "seq-mean-token-mean"}
    found = []
    for coefficient in (0.0, 100.0):
        config = configured(small_config, options | {"entropy_coeff": coefficient, "micro_batch_size_per_gpu": 3})
        ((logged, gradients),) = learn(worlds, config, full_batch, (1, {}, {}))
        found.append(gradients)
    mean, _, reference = in_float64(config, full_batch)
    assert logged["actor/pg_loss"] == pytest.approx(mean, rel=1e-4)
    assert relative_difference(reference, found[0]) < 5e-6 < relative_difference(found[0], found[1])


def test_top_k_beyond_the_vocabulary_is_refused(make_actor, refused, tmp_path: Path):
    source = """
from verl.algorithms.losses import policy_loss
@policy_loss(statistics=('top_k',), top_k=5000)
def loss(inputs):
    return inputs.logprobs, {}
"""
    with refused("...asks for top_k=5000 of ... tokens; lower it"):
        make_actor(policy_loss=f"{user_code(tmp_path, source)}:loss")
