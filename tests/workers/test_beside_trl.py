"""A pretrained model's gradients beside those of TRL's GRPO, on the same batch."""

import subprocess
from pathlib import Path

import pytest
import torch
from bench_step import trl_python
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from tests.conftest import changed, unavailable
from tests.workers.groups import all_prompts, policy_batch, relative_difference, sample, scored, start_group
from verl.config import PPOConfig

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(1500)]

KL_COEF = 0.1


@pytest.fixture(scope="module")
def trl() -> str:
    """The interpreter of TRL's environment; without the package index its tests skip, in continuous integration they
    fail."""
    try:
        return trl_python()
    except subprocess.CalledProcessError as error:
        unavailable(str(error))


def test_gradients_match_trl(small_config: PPOConfig, smollm2: Path, trl: str, ray_session: None, tmp_path: Path):
    model = {"path": str(smollm2), "param_dtype": "float32", "share_prompts": True, "use_remove_padding": True}
    actor = {"use_kl_loss": True, "kl_loss_coef": KL_COEF, "loss_agg_mode": "token-mean", "clip_ratio_c": None}
    actor |= {"use_unbiased_kl": True, "optim": {"grad_clip": 1e9}}  # TRL's default; the script clips no gradient
    data = {"max_prompt_length": 64}
    config = changed(small_config, data=data, model=model, actor=actor, rollout={"name": "hf"})
    prompts = all_prompts(config, AutoTokenizer.from_pretrained(smollm2))[:3]
    group = start_group(config, 1)
    batch = sample(group, prompts, config.rollout.train_kwargs, 1)
    logprobs = scored(group, batch).logprobs
    # Some ratios are clipped on either side.
    torch.manual_seed(1)
    batch = policy_batch(batch, logprobs + 0.3 * torch.randn(logprobs.shape))
    (ours,) = group.run_split("gradients", batch, len(logprobs), len(batch))
    (metrics,) = group.run_split("actor.update", batch, len(logprobs), len(batch))
    group.close()
    assert metrics["actor/pg_clipfrac"] > 0.05

    ids, mask = batch.rows()
    longest = ids.shape[1] - batch.width
    columns = {"old_per_token_logps": "old_logprobs", "ref_per_token_logps": "ref_logprobs", "advantages": "advantages"}
    inputs = {name: batch.padded(column) for name, column in columns.items()}
    for name, values in (("ids", ids), ("mask", mask)):
        inputs |= {f"prompt_{name}": values[:, :longest], f"completion_{name}": values[:, longest:]}
    save_file({name: values.contiguous() for name, values in inputs.items()}, tmp_path / "batch.safetensors")
    script = Path(__file__).with_name("trl_gradients.py")
    files = [tmp_path / "batch.safetensors", tmp_path / "gradients.safetensors"]
    command = [trl, script, smollm2, str(KL_COEF), *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    theirs = load_file(tmp_path / "gradients.safetensors")
    loss = theirs.pop("loss").item()
    assert metrics["actor/pg_loss"] + KL_COEF * metrics["actor/kl_loss"] == pytest.approx(loss, rel=1e-4)
    assert ours.keys() == theirs.keys()
    assert relative_difference(ours, theirs) < 1e-3
