"""A researcher's own estimator of KL(policy || reference): ``actor.kl_loss_type`` and ``algorithm.kl_penalty``.

Shapes: B responses, R response columns.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from verl.config.errors import ConfigError
from verl.utils.own import OwnCall
from verl.utils.user_code import is_own


def kl_estimator(name: str, field: str, options: Mapping[str, Any]) -> str | Callable[[Tensor, Tensor], Tensor]:
    """``name`` itself, or the user's function that it is the import path of, with checks.

    The function takes ``(logprobs, ref_logprobs)``, both [B, R] in nats, and the keyword arguments ``options``. It
    returns an estimate of each token's divergence, [B, R], that has a gradient in ``logprobs`` wherever these have one.

    Raises:
        ConfigError: as :class:`OwnCall`, or the function has state, which nobody would save.
    """
    if not is_own(name):
        return name
    own = OwnCall(field, name, options, ("logprobs", "ref_logprobs"))
    own.refuse_state()

    def estimate(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        found = own(logprobs, ref_logprobs)
        shape = tuple(logprobs.shape)
        if not isinstance(found, Tensor) or found.shape != logprobs.shape:
            what = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise ConfigError(f"{own.where}: returned {what}; expected a tensor of shape {shape}, one value per token")
        if logprobs.requires_grad and not found.requires_grad:
            raise ConfigError(f"{own.where}: returned a tensor without a gradient; compute it from logprobs with torch")
        # In the loss, a value that is not finite is the optimizer's to notice, without a wait for the device.
        if not logprobs.requires_grad and not bool(found.isfinite().all()):
            raise ConfigError(f"{own.where}: returned NaN or infinity; expected finite numbers, for equal inputs too")
        return found

    return estimate
