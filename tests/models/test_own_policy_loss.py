"""Gradients of policy losses as users write them: whatever the micro-batches, layout and workers, those of float64."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.conftest import changed
from tests.models import own_losses
from tests.models.models_in_worlds import counts, example
from tests.workers.groups import relative_difference
from verl.algorithms.losses import StepSize
from verl.batch import Batch
from verl.config import ConfigError, PPOConfig
from verl.single_controller.roles import PolicyWorkers
from verl.workers.actor import Actor
from verl.workers.policy_loss import PolicyLoss

pytestmark = pytest.mark.slow

GROUPS = [5, 2, 9, 5, 2, 9, 9, 5]
"""Of the rows of ``example``."""
LOSSES = {
    "everything": f"{own_losses.__file__}:everything",
    "of_one_response": "tests.models.own_losses:of_one_response",
    "pacs": "verl.recipes.pacs:pacs_loss",
}
BY_TOKENS = {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 44}
SHARED = {"use_remove_padding": True, "ulysses_sequence_parallel_size": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "1 worker, all rows at once": (1, {"logits_chunk_size": 0}, {"micro_batch_size_per_gpu": 64}),
    "1 worker, packed, by groups": (1, {"use_remove_padding": True}, {"micro_batch_size_per_gpu": 4}),
    "2 workers, by tokens": (2, {}, BY_TOKENS),
    # One of them has copies alone, where groups stay together.
    "4 workers": (4, {}, {"micro_batch_size_per_gpu": 3}),
    "2 workers to a sequence": (4, SHARED, BY_TOKENS),
}


def configured(config: PPOConfig, loss: str, **actor: Any) -> PPOConfig:
    """With gradients as they are."""
    options = {"policy_loss": LOSSES[loss], "use_kl_loss": False, "optim": {"grad_clip": 1e9}, **actor}
    return changed(config, actor=options, trainer={"n_gpus_per_node": 4})


@pytest.fixture(scope="module")
def batch() -> Batch:
    """The example, with every column that there is."""
    rows, generator = example(), torch.Generator().manual_seed(1)
    tokens = torch.rand(4, len(rows.advantages), generator=generator)
    rows.fill(**dict(zip(own_losses.OLD_STATISTICS, tokens, strict=False)), entropy=tokens[3])
    rows.fill(scores=torch.rand(8, generator=generator), rewards=torch.arange(8.0), correct=torch.arange(8) % 3 == 0)
    return rows.fill(group=torch.tensor(GROUPS))


def sizes(batch: Batch) -> StepSize:
    return StepSize(*counts(batch), batch.width)


def in_float64(config: PPOConfig, batch: Batch) -> tuple[float, dict[str, float], dict[str, Tensor]]:
    """The loss, the metrics, and the gradients of the whole mini-batch at once, from the logits of whole rows."""
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float64)
    loss, size = PolicyLoss(config.actor), sizes(batch)
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
def test_gradients_are_those_of_the_whole_mini_batch_in_float64(name: str, worlds, small_config, batch):
    config = configured(small_config, name, loss_agg_mode="token-mean")
    size, loss = sizes(batch), PolicyLoss(config.actor)
    prepared = loss.prepared(batch, size)
    expected, metrics, gradients = in_float64(config, prepared)
    for layout, (world_size, model, batching) in LAYOUTS.items():
        changes = replace(config, model=replace(config.model, **model), actor=replace(config.actor, **batching))
        workers = SimpleNamespace(world_size=world_size)
        rows, _ = PolicyWorkers(workers, changes, loss.needs.whole_groups)._to_learn(prepared)
        for logged, found in worlds[world_size].run(own_losses.learn, config, rows, size, model, batching):
            assert relative_difference(gradients, found) < 5e-6, layout
            assert logged["actor/pg_loss"] == pytest.approx(expected, rel=1e-4), layout
            assert {key: logged[f"actor/{key}"] for key in metrics} == pytest.approx(metrics, rel=1e-4), layout


def test_a_loss_of_responses_goes_with_entropy_bonus_and_any_aggregation(worlds, small_config, batch):
    options = {"entropy_coeff": 100.0, "loss_agg_mode": "seq-mean-token-mean", "micro_batch_size_per_gpu": 3}
    size, found = sizes(batch), []
    for coefficient in (0.0, 100.0):
        config = configured(small_config, "of_one_response", **options | {"entropy_coeff": coefficient})
        ((logged, gradients),) = worlds[1].run(own_losses.learn, config, batch, size, {}, {})
        found.append(gradients)
    config = configured(small_config, "of_one_response", **options)
    mean, _, reference = in_float64(config, batch)
    assert logged["actor/pg_loss"] == pytest.approx(mean, rel=1e-4)
    assert relative_difference(reference, found[0]) < 5e-6 < relative_difference(found[0], found[1])


def test_more_tokens_than_there_are_are_refused(small_config, model_config, single_mesh, tmp_path: Path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from verl.algorithms.losses import policy_loss\n"
        "@policy_loss(statistics=('top_k',), top_k=5000)\n"
        "def loss(inputs):\n    return inputs.logprobs, {}\n"
    )
    actor = changed(small_config.actor, policy_loss=f"{file}:loss")
    with pytest.raises(ConfigError, match=r"asks for top_k=5000 of \d+ tokens; lower it"):
        Actor(actor, model_config, single_mesh, 1.0, 10, 9)
