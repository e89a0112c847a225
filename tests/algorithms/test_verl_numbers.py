"""Advantages, losses, gradients, aggregations and KL terms equal those of veRL 0.9.1, which runs in its own process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import unavailable
from safetensors.torch import load_file, save_file
from torch import Tensor

from verl.algorithms.advantages import ADVANTAGE_ESTIMATORS
from verl.algorithms.advantages.estimators import token_variances
from verl.algorithms.kl import KL_ESTIMATORS
from verl.algorithms.losses import LOSS_AGGREGATIONS, POLICY_LOSSES, BatchSize, value_loss

PACKAGES = ("verl==0.9.1", "tensordict", "orjson", "pyvers", "codetiming")

BOUNDS = {"clip_low": 0.1, "clip_high": 0.3}
LOSSES = {
    "vanilla": ("ppo_clip", BOUNDS | {"clip_ratio_c": 3.0}),
    "gspo": ("gspo", BOUNDS),
    "cispo": ("cispo", BOUNDS),
    "geo_mean": ("gmpo", BOUNDS),
    "gpg": ("gpg", {}),
    "dro": ("dro", {"dro_beta": 0.1}),
    "dppo_tv": ("dppo_tv", BOUNDS | {"clip_ratio_c": 3.0}),
    "dppo_kl": ("dppo_kl", BOUNDS | {"clip_ratio_c": 3.0}),
    "sapo": ("sapo", {"tau_pos": 1.0, "tau_neg": 1.05}),
}
"""veRL's name -> ours, with its options."""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with veRL, which shares our package's name and cannot be in one process with it."""
    folder = tmp_path_factory.mktemp("packages")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *PACKAGES]
    installed = subprocess.run(command, capture_output=True, text=True)
    if installed.returncode:
        unavailable(installed.stderr.strip().splitlines()[-1])
    return folder


def random_batch(seed: int) -> dict[str, Tensor]:
    """Three groups of four responses of 1 to 9 tokens; one group has equal scores."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = 12, 9
    mask = torch.arange(columns) < torch.randint(1, columns + 1, (rows,), generator=generator)[:, None]
    names = ("old_values", "returns", "values")
    batch = {name: torch.randn(rows, columns, generator=generator) for name in names}
    batch |= {name: -torch.rand(rows, columns, generator=generator) for name in ("logprobs", "old")}
    scores = torch.randint(-1, 3, (rows,), generator=generator).float()
    scores[:4] = 1
    ends = torch.zeros(rows, columns).scatter(1, mask.sum(dim=1, keepdim=True) - 1, scores[:, None])
    batch |= {"mask": mask, "rewards": ends, "groups": torch.arange(rows) // 4}
    batch["sum_pi_squared"] = torch.rand(rows, columns, generator=generator)
    # geo_mean is defined for one advantage per response.
    batch["advantages"] = torch.randn(rows, 1, generator=generator).expand(rows, columns).contiguous()
    return batch | {"baselines": torch.randn(rows, generator=generator)}


def our_numbers(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same quantities by our functions."""
    mask, size = batch["mask"], BatchSize(int(batch["mask"].sum()), len(batch["mask"]), batch["mask"].shape[1])
    inputs, found = (batch["rewards"], mask, batch["groups"]), dict[str, Tensor]()
    options = {
        "gamma": 0.9,
        "learned_mask": mask,
        "greedy_scores": batch["baselines"],
        "variances": token_variances(batch["old"], batch["sum_pi_squared"]),
    }
    for name, estimate in ADVANTAGE_ESTIMATORS.items():
        if name != "gae":
            found[name] = estimate(*inputs, norm_by_std=True, **options)[0]
    for name in ("grpo", "grpo_passk"):
        by_std = found.pop(name)
        found |= {f"{name} True": by_std}
        found[f"{name} False"] = ADVANTAGE_ESTIMATORS[name](*inputs, norm_by_std=False)[0]
    found["gae"], found["gae returns"] = ADVANTAGE_ESTIMATORS["gae"](
        *inputs, values=batch["values"], lam=0.8, **options
    )
    for theirs, (ours, bounds) in LOSSES.items():
        logprobs = batch["logprobs"].clone().requires_grad_()
        losses, _ = POLICY_LOSSES[ours](logprobs, batch["old"], batch["advantages"], mask, **bounds)
        loss = LOSS_AGGREGATIONS["seq-mean-token-mean"](losses, mask, size)
        (found[f"{theirs} gradient"],) = torch.autograd.grad(loss, logprobs)
        found[f"{theirs} loss"] = loss.detach()
    for mode in ("token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum"):
        found[f"aggregate {mode}"] = LOSS_AGGREGATIONS[mode](batch["advantages"] * mask, mask, size)
    for kind in ("kl", "abs", "mse", "low_var_kl"):
        found[f"kl {kind}"] = KL_ESTIMATORS[kind](batch["logprobs"], batch["old"]) * mask
    values = batch["values"].clone().requires_grad_()
    losses, _ = value_loss(values, batch["old_values"], batch["returns"], mask, 0.2)
    (found["value gradient"],) = torch.autograd.grad(LOSS_AGGREGATIONS["token-mean"](losses, mask, size), values)
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(5))
def test_numbers_equal_those_of_verl(seed: int, packages: Path, tmp_path: Path):
    batch, script = random_batch(seed), Path(__file__).with_name("verl_reference.py")
    save_file(batch, tmp_path / "in.safetensors")
    command = [sys.executable, str(script), str(tmp_path / "in.safetensors"), str(tmp_path / "out.safetensors")]
    environment = os.environ | {"PYTHONPATH": str(packages)}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    theirs, ours = load_file(tmp_path / "out.safetensors"), our_numbers(batch)
    assert theirs.keys() == ours.keys()
    differences = {}
    for name, value in theirs.items():
        difference = (ours[name].double() - value).abs()
        differences[name] = (difference * batch["mask"] if difference.dim() else difference).max().item()
    assert {name: size for name, size in differences.items() if not size < 2e-6} == {}
