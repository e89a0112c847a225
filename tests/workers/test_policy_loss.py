"""A policy loss of the user's own is checked when a run starts, and so is what it returns."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kit import ppo_config, shipped_config, user_code
from tests.recipes.loss_inputs import loss_inputs
from tests.tables import refusals
from verl.algorithms.losses import LossNeeds, policy_loss
from verl.batch import Batch
from verl.config import PPOConfig
from verl.workers.policy_loss import CustomLoss, check_policy_loss

HEADER = "import torch\nfrom verl.algorithms.losses import policy_loss\n"
WHOLE = "@policy_loss(whole_groups=True)\n"
LOSS = "def loss(inputs, scale=1.0):\n    return scale * inputs.logprobs, {}\n"


def config_of(folder: Path, source: str, *overrides: str) -> PPOConfig:
    return ppo_config(f"actor.policy_loss={user_code(folder, HEADER + source)}:loss", *overrides)


def check(config: PPOConfig) -> None:
    check_policy_loss(config, CustomLoss(config.actor))


@pytest.mark.parametrize(("options", "overrides", "line"), refusals("workers/refusals.txt", "losses"))
def test_loss_that_a_run_cannot_serve_is_refused(tmp_path, refused, options: str, overrides: str, line: str):
    with refused(line):
        check(config_of(tmp_path, f"@policy_loss({options})\n{LOSS}", overrides))


def test_missing_loss_is_refused(tmp_path, refused):
    with refused("actor.policy_loss='TMP/mine.py:loss': TMP/mine.py has no function or class 'loss'"):
        check(config_of(tmp_path, ""))


def test_loss_that_a_run_can_serve_is_accepted(tmp_path):
    check(config_of(tmp_path, LOSS, "+actor.policy_loss_kwargs.scale=2", "actor.use_kl_loss=false"))
    check(config_of(tmp_path, WHOLE + LOSS, "actor.micro_batch_size_per_gpu=8"))
    # A group of more tokens than that is a micro-batch by itself.
    by_tokens = ["actor.use_dynamic_bsz=true", "actor.ppo_max_token_len_per_gpu=600"]
    check(config_of(tmp_path, WHOLE + LOSS, "actor.micro_batch_size_per_gpu=1", *by_tokens))


@pytest.mark.parametrize(("returned", "line"), refusals("workers/refusals.txt", "returned"))
def test_what_a_loss_returns_is_checked(tmp_path, refused, returned: str, line: str):
    loss = CustomLoss(config_of(tmp_path, f"def loss(inputs):\n    return {returned}\n").actor)
    with refused(line):
        loss.losses(loss_inputs([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], [[1, 1, 1], [1, 0, 0]]))


def test_metrics_are_sums_over_the_tokens(tmp_path):
    metrics = "{'tokens': inputs.response_mask.sum(), 'rows': inputs.logprobs[:, 0], 'one': 2}"
    loss = CustomLoss(config_of(tmp_path, f"def loss(inputs):\n    return inputs.logprobs, {metrics}\n").actor)
    inputs = loss_inputs([[1.0, 0.0], [7.0, 0.0], [4.0, 0.0]], [[1, 1], [0, 0], [1, 0]])
    found = {name: value.item() for name, value in loss.losses(inputs)[1].items()}
    # Three tokens of two responses: 2.5, the mean of the two, is 7.5 / 3.
    assert found == {"tokens": 3.0, "rows": 7.5, "one": 2.0}


def test_copies_are_hidden_from_losses_of_whole_groups(tmp_path):
    source = "def loss(inputs):\n    return inputs.logprobs * len(inputs.logprobs), {'seen': len(inputs.logprobs)}\n"
    loss = CustomLoss(config_of(tmp_path, WHOLE + source).actor)
    inputs = loss_inputs([[1.0], [2.0], [3.0]], [[1], [0], [1]], group_ids=torch.tensor([5, -1, 5]))
    losses, metrics = loss.losses(inputs, torch.tensor([False, True, False]))
    assert (losses.flatten().tolist(), metrics["seen"].item()) == ([2.0, 0.0, 6.0], 2.0)
    # Of copies alone nothing is learned, whatever the function makes of them; the names of the metrics are known.
    losses, metrics = loss.losses(inputs, torch.ones(3, dtype=torch.bool))
    assert (losses.flatten().tolist(), metrics["seen"].item()) == ([0.0, 0.0, 0.0], 0.0)
    losses.sum().backward()
    assert not inputs.logprobs.grad.any()


def test_prepared_columns_reach_the_loss(tmp_path, refused):
    source = "@policy_loss(prepare=lambda m, **_: {'a': m.advantages * m.size.num_tokens, 'b': m.old_logprobs[:, 0]})\n"
    loss = CustomLoss(config_of(tmp_path, source + LOSS).actor)
    mini = batch_of([[1.0, 2.0]])
    size = loss_inputs([[0.0, 0.0]], [[1, 1]]).size
    prepared = loss.prepared(mini, size)
    assert (prepared.padded("a").tolist(), prepared.padded("b").tolist()) == ([[2.0, 4.0]], [-0.5])
    assert "a" not in mini and loss.inputs(prepared, size).prepared["b"].tolist() == [-0.5]
    for name in ("values", "lengths", "width"):
        taken = CustomLoss(config_of(tmp_path, source.replace("'a'", f"'{name}'") + LOSS).actor)
        with refused(f"...its prepare returned '{name}', a name of the batch's own; rename it"):
            taken.prepared(mini, size)
    wrong = CustomLoss(config_of(tmp_path, "@policy_loss(prepare=lambda m, **_: {'a': 1})\n" + LOSS).actor)
    with refused("...its prepare, a: returned int; expected a tensor of shape [1, 2] or [1]"):
        wrong.prepared(mini, size)


def batch_of(advantages: list[list[float]]) -> Batch:
    values = torch.tensor(advantages)
    old = torch.full(values.shape, -0.5)
    batch = Batch.of([[1]] * len(values), torch.ones_like(values).long().tolist(), learn_mask=values.flatten() > -9)
    return batch.fill(old_logprobs=old, advantages=values)


def test_built_in_losses_need_nothing():
    loss = CustomLoss(shipped_config().actor)
    mini = batch_of([[1.0]])
    assert (loss.own, loss.needs, loss.statistics) == (None, LossNeeds(), ())
    assert loss.prepared(mini, loss_inputs([[0.0]], [[1]]).size) is mini


def test_needs_say_what_is_sent_and_when():
    def needs(**asked: Any) -> LossNeeds:
        found: LossNeeds = policy_loss(**asked)(lambda inputs: None).needs
        return found

    assert needs(columns=("correct", "rollout_logprobs"), whole_groups=True).batch_columns == (
        "group",
        "correct",
        "rollout_logprobs",
    )
    for asked, of_old, before in (
        ({"columns": ("correct",)}, False, False),
        ({"columns": ("old_entropy",)}, True, True),
        ({"old_statistics": ("logsumexp",)}, True, True),
        ({"prepare": dict}, False, True),
    ):
        found = needs(**asked)
        assert (found.old_policy, found.before_update) == (of_old, before), asked
