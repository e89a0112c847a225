"""Loads, checks and calls custom policy losses. Built-in losses are called in ``verl.workers.actor``.

Legend: B = number of responses in the batch, R = number of response columns.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from verl.algorithms.losses import BatchSize, LossInputs, LossNeeds
from verl.algorithms.losses.custom import COLUMNS
from verl.batch import EPISODE, Batch
from verl.batch.columns import KINDS
from verl.config.actor import ActorConfig
from verl.config.checks import require
from verl.config.errors import ConfigError
from verl.config.ppo import PPOConfig
from verl.utils.user_code import UserFunction, check_finite, check_signature, check_tensor, is_import_path, user_code

LOGGED = ("pg_loss", "entropy_loss", "kl_loss", "tis_weight", "tis_capped", "grad_norm", "lr", "skipped_updates")
"""Names of metrics that every update logs. Custom losses must not use these names."""

KWARGS = "actor.policy_loss_kwargs"


class CustomLoss:
    """Custom loss that ``actor.policy_loss`` imports, and what it needs. A built-in loss needs nothing.

    Raises:
        ConfigError: If an import path does not name a function, or if that function does not accept its arguments.
    """

    def __init__(self, config: ActorConfig) -> None:
        self.where = f"actor.policy_loss={config.policy_loss!r}"
        self.options = config.policy_loss_kwargs
        self.own: UserFunction | None = None
        self.needs = LossNeeds()
        if is_import_path(config.policy_loss):
            self.own = UserFunction("actor.policy_loss", config.policy_loss, ["inputs"], self.options)
            self.needs = getattr(self.own.function, "needs", self.needs)
            if self.needs.prepare is not None:
                check_signature(self.where, self.needs.prepare, ["mini_batch"], self.options, KWARGS)

    @property
    def statistics(self) -> tuple[str, ...]:
        """Names of the statistics that the output head must compute in addition to the entropy."""
        return tuple(name for name in self.needs.statistics if name != "entropy")

    def prepared(self, mini: Batch, size: BatchSize) -> Batch:
        """Return ``mini`` with the additional columns that the loss prepares, if any."""
        prepare = self.needs.prepare
        if prepare is None:
            return mini
        where = f"{self.where}: its prepare"
        with user_code(f"{where}(mini_batch)"):
            columns = prepare(self.inputs(mini, size), **self.options)
        if not isinstance(columns, Mapping):
            raise ConfigError(f"{where} returned {type(columns).__name__}; expected a dict of tensors, [B, R] or [B]")
        # Fill a new batch: these columns belong to this mini-batch, but its other tensors are the whole step's.
        prepared = mini.columns(*mini.names)
        for name, values in columns.items():
            if name in KINDS or hasattr(mini, name):
                raise ConfigError(f"{where} returned {name!r}, a name of the batch's own; rename it")
            check_tensor(f"{where}, {name}", values, (len(mini), mini.width), (len(mini),))
            prepared.fill(EPISODE if values.dim() == 1 else None, **{name: values})
        return prepared

    def inputs(self, batch: Batch, size: BatchSize, scored: Batch | None = None) -> LossInputs:
        """Return the inputs of the custom functions for a batch.

        Args:
            scored: Responses with log-probabilities and statistics of the current policy, or None before the update.
        """
        needs = self.needs
        unknown = torch.full((len(batch), batch.width), torch.nan)
        statistics = {} if scored is None else {n: scored.padded(n) for n in scored.names}
        entropy = statistics.pop("entropy", unknown)
        return LossInputs(
            statistics.pop("logprobs", unknown),
            batch.padded("old_logprobs"),
            batch.padded("advantages"),
            batch.padded("learn_mask"),
            batch.policy_mask,
            batch.padded("response_tokens"),
            entropy if "entropy" in needs.statistics else entropy.detach(),
            size,
            statistics,
            {name: batch.padded(name) for name in needs.old_statistics},
            {name: batch.padded(name) for name in batch.names if name not in KINDS},
            **{name: _in_float32(batch.padded(COLUMNS[name])) for name in needs.fields},
        )

    def padding_rows(self, micro: Batch) -> Tensor | None:
        """Return a mask of this worker's padding rows, [B] bool, or None if the loss may read these rows."""
        return micro.group < 0 if self.needs.whole_groups else None

    def losses(self, inputs: LossInputs, copied: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """Call the custom function. Return losses [B, R] or [B], and metrics as sums over tokens.

        Args:
            inputs: Inputs for all rows.
            copied: Mask of padding rows, [B] bool, which are not passed to the function, or None to pass all rows,
                because padding rows are masked out of the loss.
        """
        if copied is None or not copied.any():
            return self._called(inputs, check=True)
        if copied.all():
            # Still call the function, since other workers report the same metrics. No gradient reaches the model.
            _, metrics = self._called(replace(inputs, logprobs=inputs.logprobs.detach()), check=False)
            return 0 * inputs.logprobs, {name: torch.zeros_like(value) for name, value in metrics.items()}
        rows = (~copied).nonzero().flatten().to(inputs.logprobs.device)
        chosen = replace(inputs, **tree_map_only(Tensor, lambda values: values[rows], vars(inputs)))
        losses, metrics = self._called(chosen, check=True)
        return losses.new_zeros(len(copied), *losses.shape[1:]).index_copy(0, rows, losses), metrics

    def check_per_token(self, losses: Tensor) -> None:
        """Raise ``ConfigError`` if there is one loss per response, because per-token weights need per-token losses."""
        fix = f"{self.where} returns one number a response, which has no tokens to weight; set it to null"
        require(losses.dim() == 2, "algorithm.rollout_correction.rollout_is", "token or sequence", fix)

    def _called(self, inputs: LossInputs, check: bool) -> tuple[Tensor, dict[str, Tensor]]:
        assert self.own is not None, "only a loss of the user's own is called"
        returned = self.own(inputs)
        if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping)):
            kind = type(returned).__name__
            raise ConfigError(f"{self.where}: returned a {kind}; expected a tensor of losses and a dict of metrics")
        losses, metrics = returned
        if check:
            self._check_losses(losses, inputs)
        return losses, {name: self._total(name, value, inputs) for name, value in metrics.items()}

    def _check_losses(self, losses: Tensor, inputs: LossInputs) -> None:
        where, mask = f"{self.where}: its losses", inputs.response_mask
        check_tensor(where, losses, mask.shape, mask.shape[:1])
        if not losses.requires_grad:
            raise ConfigError(f"{where} have no gradient; compute them from inputs.logprobs")
        learned = mask if losses.dim() == 2 else mask.any(dim=1)
        check_finite(where, torch.where(learned, losses.detach(), 0.0))

    def _total(self, name: str, value: Any, inputs: LossInputs) -> Tensor:
        """Return a metric's sum, scaled so that dividing it by the mini-batch's number of tokens yields the mean."""
        mask, size = inputs.response_mask, inputs.size
        if name in LOGGED:
            raise ConfigError(f"{self.where}: its metric {name!r} has the name of one of the update's; rename it")
        values: Tensor = torch.as_tensor(value, device=mask.device).detach().float()
        if values.dim() == 0:
            return values
        if values.shape != mask.shape[:1]:
            raise ConfigError(f"{self.where}: its metric {name!r} is {list(values.shape)}; it is a scalar, or [b]")
        return torch.where(mask.any(dim=1), values, 0.0).sum() * (size.num_tokens / size.num_sequences)


def check_policy_loss(config: PPOConfig, loss: CustomLoss) -> None:
    """Raise ``ConfigError`` if the run's options conflict with the requirements of the policy loss."""
    needs, actor, n = loss.needs, config.actor, config.rollout.n
    require(
        "ref_logprobs" not in needs.columns or config.uses_reference,
        "actor.use_kl_loss",
        actor.use_kl_loss,
        f"{actor.policy_loss} asks for ref_logprobs; set it to true, with actor.kl_loss_coef=0 for no other effect",
    )
    fix = f"{actor.policy_loss} compares with the policy before the update, where this compares with the engine"
    old = bool(needs.old_statistics)
    require(not old or not actor.bypass_mode, "actor.bypass_mode", True, f"{fix}; set it to false")
    if not needs.whole_groups:
        return
    turns = config.rollout.multi_turn
    fix = (
        f"{actor.policy_loss} compares the rollout.n={n} responses to a prompt, but agents' sessions have several rows"
    )
    require(
        not (turns.enable and turns.agent.enabled), "actor.policy_loss", actor.policy_loss, f"{fix}; choose another"
    )
    require(
        actor.use_dynamic_bsz or actor.micro_batch_size_per_gpu >= n,
        "actor.micro_batch_size_per_gpu",
        actor.micro_batch_size_per_gpu,
        f"{actor.policy_loss} needs the rollout.n={n} responses to a prompt in one micro-batch; set at least {n}",
    )
    require(
        not config.algorithm.use_pf_ppo,
        "algorithm.use_pf_ppo",
        True,
        f"{actor.policy_loss} needs each response to a prompt once, but resampling repeats them; set it to false",
    )


def _in_float32(values: Tensor) -> Tensor:
    return values.float() if values.is_floating_point() else values
