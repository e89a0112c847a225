"""Numbers of veRL's own functions, computed in a process of its own: INPUTS.safetensors OUTPUTS.safetensors."""

import sys
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file
from verl.workers.config import ActorConfig

from verl.trainer.ppo import core_algos

AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum")


def main() -> None:
    """Compute every quantity for the batch in the first file, and write them by name to the second."""
    batch = load_file(sys.argv[1])
    mask, rewards, groups = batch["mask"].float(), batch["rewards"], batch["groups"].numpy()
    found: dict[str, torch.Tensor] = {}

    def advantages(name: str, **options: object) -> None:
        found[name] = core_algos.get_adv_estimator_fn(name.partition(" ")[0])(
            token_level_rewards=rewards, response_mask=mask, **options
        )[0]

    for name in ("rloo", "opo", "gpg", "reinforce_plus_plus_baseline"):
        advantages(name, index=groups)
    for name in ("grpo", "grpo_passk"):
        for by_std in (True, False):
            config = SimpleNamespace(get=lambda key, default=None, by_std=by_std: by_std)
            advantages(f"{name} {by_std}", index=groups, norm_adv_by_std_in_grpo=by_std, config=config)
    advantages("reinforce_plus_plus", config=SimpleNamespace(gamma=0.9))
    advantages("remax", reward_baselines=batch["baselines"])
    variance_inputs = {"old_log_probs": batch["old"], "sum_pi_squared": batch["sum_pi_squared"]}
    for name in ("optimal_token_baseline", "tir_optimal_token_baseline"):
        advantages(name, index=groups, **variance_inputs)
    found["gae"], found["gae returns"] = core_algos.compute_gae_advantage_return(
        rewards, batch["values"], mask, torch.tensor(0.9), torch.tensor(0.8)
    )

    config = object.__new__(ActorConfig)  # its checks ask for much that losses do not read
    policy_loss = SimpleNamespace(get=lambda key, default=None: default, dro_beta=0.1)
    bounds = {"clip_ratio": 0.2, "clip_ratio_low": 0.1, "clip_ratio_high": 0.3, "clip_ratio_c": 3.0}
    vars(config).update(bounds, tau_pos=1.0, tau_neg=1.05, policy_loss=policy_loss, global_batch_info={})
    for name in ("vanilla", "gspo", "cispo", "geo_mean", "gpg", "dro", "dppo_tv", "dppo_kl", "sapo"):
        logprobs = batch["logprobs"].clone().requires_grad_()
        arguments = (batch["old"], logprobs, batch["advantages"], mask)
        loss, *_ = core_algos.get_policy_loss_fn(name)(*arguments, loss_agg_mode="seq-mean-token-mean", config=config)
        (found[f"{name} gradient"],) = torch.autograd.grad(loss, logprobs)
        found[f"{name} loss"] = loss.detach()
    for mode in AGGREGATIONS:
        found[f"aggregate {mode}"] = core_algos.agg_loss(batch["advantages"], mask, mode)
    for kind in ("kl", "abs", "mse", "low_var_kl"):
        found[f"kl {kind}"] = core_algos.kl_penalty(batch["logprobs"], batch["old"], kind) * mask
    values = batch["values"].clone().requires_grad_()
    loss, _ = core_algos.compute_value_loss(values, batch["returns"], batch["old_values"], mask, 0.2, "token-mean")
    (found["value gradient"],) = torch.autograd.grad(loss, values)
    save_file({name: value.double().contiguous() for name, value in found.items()}, sys.argv[2])


main()
