"""The reward manager: rank metrics of a batch become the auxiliary signal Phi (arXiv 2509.23808).

Shapes: B responses, R padded response tokens. It keeps two kinds of state, both moving averages over training
steps: a baseline mu per layer and indicator, and the mean score. ``shape`` and ``shape_advantages`` only read them;
``update``, called once at the end of a training step, alone changes them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl.algorithms.shaping import (
    auxiliary_signal,
    controller_weights,
    exploration_beta,
    last_token_mask,
    relative_deviation,
    shaped_advantages,
)
from verl.config.signal import RewardManagerConfig

RankMetrics = Mapping[str, Mapping[str, Tensor]]
"""Layer key to metric name to ``[B]``."""


@dataclass(frozen=True)
class RewardShaping:
    """What rank shaping adds to one batch."""

    phi: Tensor
    """Auxiliary signal ``[B]``, float64, mean over the layers."""
    token_rewards: Tensor
    """Rewards ``[B, R]``, with Phi on the last response token if ``reward_manager.add_reward``."""
    metrics: dict[str, float]
    """Scalars to log, under ``reward_manager/``."""


class RewardManager:
    """Computes Phi, places it, and follows the baselines that it is measured against."""

    def __init__(self, config: RewardManagerConfig) -> None:
        self.config = config
        self._baselines: dict[str, dict[str, float]] = {}
        self._ema_score: float | None = None

    def shape(self, token_rewards: Tensor, response_mask: Tensor, rank_metrics: RankMetrics) -> RewardShaping:
        """Phi of every response, measured against the baselines of the previous steps; changes no state.

        Where there is no baseline yet (first step), the batch's own mean stands in for it. A metric that is NaN or
        infinite gives its response no signal.

        Args:
            token_rewards: ``[B, R]``.
            response_mask: ``[B, R]``, true or 1 on response tokens.
            rank_metrics: layer key to metric name to ``[B]``, holding every name in ``indicator_names``.

        Raises:
            ValueError: no layer, or an indicator that the metrics lack (names those available).
        """
        layers = self._indicators(rank_metrics)
        scale = self.config.aux_reward_global_weight * self._fade()
        metrics: dict[str, float] = {}
        signals = []
        for layer, indicators in layers.items():
            signal, layer_metrics = self._layer_signal(layer, indicators, scale)
            signals.append(signal)
            metrics |= layer_metrics
        phi = torch.stack(signals).mean(0)
        metrics["reward_manager/phi_mean"] = _finite_mean(phi) or 0.0
        if self.config.add_reward:
            bonus = phi.to(token_rewards)[:, None]
            token_rewards = torch.where(last_token_mask(response_mask), token_rewards + bonus, token_rewards)
        return RewardShaping(phi=phi, token_rewards=token_rewards, metrics=metrics)

    def shape_advantages(
        self, advantages: Tensor, response_mask: Tensor, phi: Tensor
    ) -> tuple[Tensor, dict[str, float]]:
        """Advantages ``[B, R]`` with min(relu(Phi), |A| / kappa) added if ``reward_manager.add_adv``, and metrics.

        ``reward_manager/shaped_token_share`` is the share of response tokens whose advantage changed,
        ``reward_manager/shaped_mean_change`` the mean absolute change over all response tokens. Without ``add_adv``
        the advantages come back as they are, with no metrics.
        """
        if not self.config.add_adv:
            return advantages, {}
        shaped = shaped_advantages(advantages, response_mask, phi, self.config.kappa, self.config.shaping_placement)
        change = (shaped - advantages)[response_mask.bool()].double().abs()
        num_tokens = max(1, change.numel())
        return shaped, {
            "reward_manager/shaped_token_share": float((change > 0).sum()) / num_tokens,
            "reward_manager/shaped_mean_change": float(change.sum()) / num_tokens,
        }

    def update(self, scores: Tensor, rank_metrics: RankMetrics) -> None:
        """Move the baselines towards this batch: mu <- (1 - a) mu + a * batch mean; the first batch sets mu.

        ``scores [B]`` are the verifiers' scores; ``rank_metrics`` as in :meth:`shape`. NaN and infinite values are
        left out of the means; a metric or score without any finite value leaves its average as it is.

        Raises:
            ValueError: as :meth:`shape`.
        """
        for layer, indicators in self._indicators(rank_metrics).items():
            baselines = self._baselines.setdefault(layer, {})
            for name, values in indicators.items():
                moved = self._moved(baselines.get(name), _finite_mean(values))
                if moved is not None:
                    baselines[name] = moved
        self._ema_score = self._moved(self._ema_score, _finite_mean(scores))

    def state_dict(self) -> dict[str, Any]:
        """Baselines and score average as plain floats; JSON keeps them exactly."""
        baselines = {layer: dict(values) for layer, values in self._baselines.items()}
        return {"baselines": baselines, "ema_score": self._ema_score}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave.

        Raises:
            ValueError: the state is malformed (names the part); the manager is then unchanged.
        """
        if not isinstance(state, Mapping) or set(state) != {"baselines", "ema_score"}:
            raise ValueError(f"reward manager state {state!r}: expected the keys baselines and ema_score")
        if not isinstance(state["baselines"], Mapping):
            raise ValueError(f"reward manager state: baselines={state['baselines']!r}: expected a mapping of layers")
        baselines: dict[str, dict[str, float]] = {}
        for layer, values in state["baselines"].items():
            if not isinstance(layer, str) or not isinstance(values, Mapping):
                raise ValueError(f"reward manager state: baselines[{layer!r}]={values!r}: expected name to number")
            baselines[layer] = {}
            for name, value in values.items():
                baselines[layer][name] = _finite_float(value, f"baselines[{layer!r}][{name!r}]")
        score = state["ema_score"]
        self._ema_score = None if score is None else _finite_float(score, "ema_score")
        self._baselines = baselines

    def _layer_signal(self, layer: str, indicators: dict[str, Tensor], scale: float) -> tuple[Tensor, dict[str, float]]:
        """Phi ``[B]`` of one layer and its scalars."""
        config = self.config
        known = self._baselines.get(layer, {})
        baselines: dict[str, float] = {}
        for name, values in indicators.items():
            # No baseline and no finite value: the number is never used, every deviation is 0.
            baselines[name] = known[name] if name in known else (_finite_mean(values) or 0.0)
        deviations = torch.stack([relative_deviation(v, baselines[n]) for n, v in indicators.items()], dim=1)
        beta = exploration_beta(deviations[:, 0], config.hypothesis_type, config.gain)
        w_explore, w_exploit = deviations.new_tensor(config.w_explore), deviations.new_tensor(config.w_exploit)
        weights = controller_weights(beta, w_explore, w_exploit, config.hypothesis_type)
        prefix = f"reward_manager/layer_{layer}"
        metrics = {f"{prefix}/beta": _finite_mean(beta) or 0.0}
        for i, name in enumerate(indicators):
            metrics[f"{prefix}/{name}/mu"] = baselines[name]
            metrics[f"{prefix}/{name}/deviation"] = _finite_mean(deviations[:, i]) or 0.0
            metrics[f"{prefix}/{name}/weight"] = _finite_mean(weights[:, i]) or 0.0
        return auxiliary_signal(deviations, weights, scale), metrics

    def _indicators(self, rank_metrics: RankMetrics) -> dict[str, dict[str, Tensor]]:
        """The configured indicators of every layer in float64, guide first; ``ValueError`` where one is missing."""
        if not rank_metrics:
            raise ValueError("rank_metrics is empty: rank shaping needs calculator.enable=true and at least one layer")
        for layer, metrics in rank_metrics.items():
            for name in self.config.indicator_names:
                if name not in metrics:
                    raise ValueError(
                        f"reward_manager.indicator_names: {name!r} is not among the metrics of layer {layer}; "
                        f"available: {', '.join(sorted(metrics))}"
                    )
        return {
            layer: {name: metrics[name].double() for name in self.config.indicator_names}
            for layer, metrics in rank_metrics.items()
        }

    def _fade(self) -> float:
        """Factor on the constant c: 1 if ``aux_fix``, else 1 - (ema_score + 1) / 2.

        Before the first update the score counts as 0, halfway. Scores outside [-1, 1], which a user's own verifier
        may give, cannot turn the signal's sign.
        """
        if self.config.aux_fix:
            return 1.0
        score = 0.0 if self._ema_score is None else self._ema_score
        return min(1.0, max(0.0, 1 - (score + 1) / 2))

    def _moved(self, average: float | None, batch_mean: float | None) -> float | None:
        if average is None or batch_mean is None:
            return batch_mean if average is None else average
        alpha = self.config.ema_alpha
        return (1 - alpha) * average + alpha * batch_mean


def _finite_mean(values: Tensor) -> float | None:
    """Mean of the finite entries, or ``None`` if there is none."""
    finite = values.double()[values.isfinite()]
    return float(finite.mean()) if finite.numel() else None


def _finite_float(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"reward manager state: {where}={value!r}: expected a finite number")
    return float(value)
