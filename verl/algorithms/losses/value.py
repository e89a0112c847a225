"""The value loss of PPO's critic (arXiv 1707.06347, eq. 9), clipped as in OpenAI baselines' ``ppo2``."""

import torch
from torch import Tensor


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, response_mask: Tensor, clip_range: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Per-token loss 0.5 max((v - G)^2, (clip(v, v_old - clip_range, v_old + clip_range) - G)^2), 0 outside the mask.

    As the larger of the two counts, a value that has moved further than ``clip_range`` towards its return G gets no
    gradient, and one that has moved away from it keeps its full gradient.

    Args:
        values: v, ``[B, R]``, in units of reward, under the critic being trained.
        old_values: v_old, ``[B, R]``, the same under the critic at the start of the step.
        returns: G, ``[B, R]``.
        clip_range: in units of reward, above 0; infinity for no clip.

    The metrics are sums over tokens: ``vf_clipfrac`` (tokens on which clipping is active) and ``num_tokens``.
    """
    if not clip_range > 0:
        raise ValueError(f"clip_range={clip_range}: must be above 0; infinity for no clip")
    mask = response_mask.bool()
    values, old_values, returns = (torch.where(mask, t, 0.0) for t in (values, old_values, returns))
    # Clamping v itself, not its difference from v_old: within the bounds the clipped value is v to the last bit.
    clipped_values = values.clamp(old_values - clip_range, old_values + clip_range)
    plain, clipped = (0.5 * (v - returns).square() for v in (values, clipped_values))
    counts = {"vf_clipfrac": clipped > plain, "num_tokens": mask}
    return torch.maximum(plain, clipped), {name: tokens.sum().to(plain.dtype) for name, tokens in counts.items()}
