"""A policy loss of the user's own is checked when a run starts, and so is what it returns."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.recipes.loss_inputs import loss_inputs
from verl.algorithms.losses import LossNeeds, policy_loss
from verl.batch import Batch
from verl.config import ConfigError, PPOConfig, load_config
from verl.workers.policy_loss import PolicyLoss, check_policy_loss

HEADER = "import torch\nfrom verl.algorithms.losses import policy_loss\n"
WHOLE = "@policy_loss(whole_groups=True)\n"
LOSS = "def loss(inputs, scale=1.0):\n    return scale * inputs.logprobs, {}\n"


def config_of(folder: Path, source: str, *overrides: str) -> PPOConfig:
    (folder / "mine.py").write_text(HEADER + source)
    return load_config(PPOConfig, "ppo_trainer", [f"actor.policy_loss={folder}/mine.py:loss", *overrides])


def check(config: PPOConfig) -> None:
    check_policy_loss(config, PolicyLoss(config.actor))


@pytest.mark.parametrize(
    ("source", "overrides", "message"),
    [
        ("", "", r"actor.policy_loss='.*mine.py:loss': .*mine.py has no function or class 'loss'"),
        (
            LOSS,
            "+actor.policy_loss_kwargs.sclae=2",
            r"'sclae'; it is called with \(inputs\) and actor.policy_loss_kwargs={'sclae': 2}",
        ),
        (
            "@policy_loss(prepare=lambda mini_batch: {})\n" + LOSS,
            "+actor.policy_loss_kwargs.scale=2",
            r"'scale'; it is called with \(mini_batch\) and actor.policy_loss_kwargs={'scale': 2}",
        ),
        (
            "@policy_loss(columns=('reward',))\n" + LOSS,
            "",
            r"columns=\('reward',\): must be a tuple of rollout_logprobs",
        ),
        ("@policy_loss(statistics='entropy')\n" + LOSS, "", "statistics='entropy': must be a tuple of entropy"),
        ("@policy_loss(statistics=('top_k',))\n" + LOSS, "", "top_k=0: must be at least 1 with the statistic top_k"),
        (
            "@policy_loss(columns=('ref_logprobs',))\n" + LOSS,
            "actor.use_kl_loss=false",
            "actor.use_kl_loss=False: .* asks for ref_logprobs; set it to true, with actor.kl_loss_coef=0",
        ),
        (
            WHOLE + LOSS,
            "actor.micro_batch_size_per_gpu=7",
            "actor.micro_batch_size_per_gpu=7: .* needs the rollout.n=8 responses to a prompt .*; set at least 8",
        ),
        (
            "@policy_loss(old_statistics=('mean_logprob',))\n" + LOSS,
            "actor.bypass_mode=true",
            "actor.bypass_mode=True: .*compares with the policy before the update.*; set it to false",
        ),
        (WHOLE + LOSS, "algorithm.use_pf_ppo=true", "algorithm.use_pf_ppo=True: .*; set it to false"),
    ],
)
def test_what_a_run_cannot_give_is_told_before_it_starts(tmp_path, source: str, overrides: str, message: str):
    with pytest.raises(ConfigError, match=message):
        check(config_of(tmp_path, source, *overrides.split()))


def test_what_a_run_can_give_is_accepted(tmp_path):
    check(config_of(tmp_path, LOSS, "+actor.policy_loss_kwargs.scale=2", "actor.use_kl_loss=false"))
    check(config_of(tmp_path, WHOLE + LOSS, "actor.micro_batch_size_per_gpu=8"))
    # A group of more tokens than that is a micro-batch by itself.
    by_tokens = ["actor.use_dynamic_bsz=true", "actor.ppo_max_token_len_per_gpu=600"]
    check(config_of(tmp_path, WHOLE + LOSS, "actor.micro_batch_size_per_gpu=1", *by_tokens))


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("inputs.logprobs", r"returned a Tensor; expected a tensor of losses and a dict"),
        ("(inputs.logprobs.mean(dim=0), {})", r"returned shape \[3\]; expected a tensor of shape \[2, 3\] or \[2\]"),
        ("(inputs.advantages, {})", "its losses have no gradient; compute them from inputs.logprobs"),
        ("(inputs.logprobs / 0, {})", "its losses: returned NaN or infinity in row 0"),
        ("(inputs.logprobs, {'a': inputs.logprobs})", r"its metric 'a' is \[2, 3\]; it is a scalar, or \[b\]"),
        ("(inputs.logprobs, {'pg_loss': 1})", "its metric 'pg_loss' has the name of one of the update's; rename it"),
        (
            "(inputs.advantagse, {})",
            r"has no attribute 'advantagse'; did you mean 'advantages'\? \(.*mine.py, line 4\)",
        ),
        (
            "(inputs.rewards + 1, {})",
            r"mine.py:loss': raised TypeError: .*mine.py, line 4\)",
        ),
    ],
)
def test_what_it_returns_is_checked(tmp_path, returned: str, message: str):
    loss = PolicyLoss(config_of(tmp_path, f"def loss(inputs):\n    return {returned}\n").actor)
    with pytest.raises(ConfigError, match=message):
        loss.losses(loss_inputs([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], [[1, 1, 1], [1, 0, 0]]))


def test_metrics_are_sums_that_are_divided_by_the_tokens(tmp_path):
    metrics = "{'tokens': inputs.response_mask.sum(), 'rows': inputs.logprobs[:, 0], 'one': 2}"
    loss = PolicyLoss(config_of(tmp_path, f"def loss(inputs):\n    return inputs.logprobs, {metrics}\n").actor)
    inputs = loss_inputs([[1.0, 0.0], [7.0, 0.0], [4.0, 0.0]], [[1, 1], [0, 0], [1, 0]])
    found = {name: value.item() for name, value in loss.losses(inputs)[1].items()}
    # Three tokens of two responses: 2.5, the mean of the two, is 7.5 / 3.
    assert found == {"tokens": 3.0, "rows": 7.5, "one": 2.0}


def test_copies_are_not_seen_where_groups_are_whole(tmp_path):
    source = "def loss(inputs):\n    return inputs.logprobs * len(inputs.logprobs), {'seen': len(inputs.logprobs)}\n"
    loss = PolicyLoss(config_of(tmp_path, WHOLE + source).actor)
    inputs = loss_inputs([[1.0], [2.0], [3.0]], [[1], [0], [1]], group_ids=torch.tensor([5, -1, 5]))
    losses, metrics = loss.losses(inputs, torch.tensor([False, True, False]))
    assert (losses.flatten().tolist(), metrics["seen"].item()) == ([2.0, 0.0, 6.0], 2.0)
    # Of copies alone nothing is learned, whatever the function makes of them; the names of the metrics are known.
    losses, metrics = loss.losses(inputs, torch.ones(3, dtype=torch.bool))
    assert (losses.flatten().tolist(), metrics["seen"].item()) == ([0.0, 0.0, 0.0], 0.0)
    losses.sum().backward()
    assert not inputs.logprobs.grad.any()


def test_prepare_sees_the_mini_batch_and_its_columns_travel(tmp_path):
    source = "@policy_loss(prepare=lambda m, **_: {'a': m.advantages * m.size.num_tokens, 'b': m.old_logprobs[:, 0]})\n"
    loss = PolicyLoss(config_of(tmp_path, source + LOSS).actor)
    mini = batch_of([[1.0, 2.0]])
    size = loss_inputs([[0.0, 0.0]], [[1, 1]]).size
    prepared = loss.prepared(mini, size)
    assert (prepared.padded("a").tolist(), prepared.padded("b").tolist()) == ([[2.0, 4.0]], [-0.5])
    assert "a" not in mini and loss.inputs(prepared, size).prepared["b"].tolist() == [-0.5]
    for name in ("values", "lengths", "width"):
        taken = PolicyLoss(config_of(tmp_path, source.replace("'a'", f"'{name}'") + LOSS).actor)
        with pytest.raises(ConfigError, match=f"its prepare returned '{name}', a name of the batch's own; rename it"):
            taken.prepared(mini, size)
    wrong = PolicyLoss(config_of(tmp_path, "@policy_loss(prepare=lambda m, **_: {'a': 1})\n" + LOSS).actor)
    with pytest.raises(
        ConfigError, match=r"its prepare, a: returned int; expected a tensor of shape \[1, 2\] or \[1\]"
    ):
        wrong.prepared(mini, size)


def batch_of(advantages: list[list[float]]) -> Batch:
    values = torch.tensor(advantages)
    old = torch.full(values.shape, -0.5)
    batch = Batch.of([[1]] * len(values), torch.ones_like(values).long().tolist(), learn_mask=values.flatten() > -9)
    return batch.fill(old_logprobs=old, advantages=values)


def test_nothing_is_asked_for_by_the_built_in_losses():
    loss = PolicyLoss(load_config(PPOConfig, "ppo_trainer").actor)
    mini = batch_of([[1.0]])
    assert (loss.own, loss.needs, loss.statistics) == (None, LossNeeds(), ())
    assert loss.prepared(mini, loss_inputs([[0.0]], [[1]]).size) is mini


def test_what_is_sent_and_when_it_must_be_known():
    def needs(**asked: Any) -> LossNeeds:
        found: LossNeeds = policy_loss(**asked)(lambda inputs: None).needs
        return found

    assert needs(columns=("correct", "rollout_logprobs"), whole_groups=True).sent == (
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
        assert (found.of_old_policy, found.before_update) == (of_old, before), asked
