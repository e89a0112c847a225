"""Reward manager that computes the auxiliary signal Phi from a batch's rank metrics (arXiv 2509.23808).

Shapes: B responses, R padded response tokens. The state consists of moving averages over training steps: a baseline mu
per layer and indicator, and the mean score. The averages change only in ``update``, at the end of each training step,
and when a state is loaded. Validation therefore uses the baselines from training.

With ``reward_manager.baseline_start=zero``, as in the paper's release, averages start at 0 and lag by one step.
``update`` then moves the baselines towards the stored means of the previous update's batch.
"""

import math
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from verl.config.rewards import RewardManagerConfig
from verl.rank.dynamics import by_layer
from verl.rank.shaping import (
    auxiliary_signal,
    controller_weights,
    exploration_beta,
    last_token_mask,
    relative_deviation,
    shaped_advantages,
)

Means = dict[str, dict[str, float]]
"""Means over responses, by layer key and indicator."""


class RewardManager:
    """Computes Phi, adds it to rewards or advantages, and tracks its baselines. It computes no rewards."""

    def __init__(self, config: RewardManagerConfig) -> None:
        self.config = config
        self._start = 0.0 if config.baseline_start == "zero" else None
        """Initial value of a moving average, or None to start at the first observed value."""
        self._baselines: Means = {}
        self._ema_score = self._start
        self._previous_means: Means | None = None
        """Batch means of the previous step, kept only if averages start at zero."""

    def compute_phi(self, rank_metrics: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, float]]:
        """Return the auxiliary signal Phi of every response and scalars to log, without changing the state.

        Phi is computed relative to the baselines of previous steps. In the first step, when there are no baselines, the
        batch mean is used instead. A NaN or infinite metric does not contribute to its response's signal. Phi is always
        0 if ``computes_phi`` is false. With ``baseline_start=zero``, Phi is 0 in the first step. Raises ``ValueError``
        if there are no layers, or if an indicator or the guide is missing. The message lists the available metrics.

        Args:
            rank_metrics: ``Batch.rank_metrics``, ``[B, L]`` by name, including all ``indicator_names`` and the guide.

        Returns:
            Phi as float64 ``[B]``, averaged over layers, and scalars under ``reward_manager/``.
        """
        layers = self._indicators(rank_metrics)
        scale = self.config.aux_reward_global_weight * self._fade()
        metrics: dict[str, float] = {}
        phi = torch.zeros(len(next(iter(rank_metrics.values()))), dtype=torch.float64)
        waits = self._start is not None and self._previous_means is None
        if self.config.computes_phi and not waits:
            signals = []
            for layer, indicators in layers.items():
                signal, layer_metrics = self._layer_signal(layer, indicators, scale)
                signals.append(signal)
                metrics |= layer_metrics
            phi = torch.stack(signals).mean(0)
            metrics["reward_manager/scale"] = scale
        metrics |= {
            "reward_manager/phi_mean": phi.mean().item(),
            "reward_manager/phi_min": phi.min().item(),
            "reward_manager/phi_max": phi.max().item(),
            "reward_manager/phi_std": phi.std(correction=0).item(),
        }
        return phi, metrics

    def shape_rewards(self, token_rewards: Tensor, response_mask: Tensor, phi: Tensor) -> Tensor:
        """Add Phi ``[B]`` to the last-token reward of each response in ``[B, R]`` if ``add_reward`` is set."""
        if not self.config.add_reward:
            return token_rewards
        bonus = phi.to(token_rewards)[:, None]
        return torch.where(last_token_mask(response_mask), token_rewards + bonus, token_rewards)

    def shape_advantages(
        self, advantages: Tensor, response_mask: Tensor, phi: Tensor
    ) -> tuple[Tensor, dict[str, float]]:
        """Add min(relu(Phi), |A| / kappa) to advantages ``[B, R]`` if ``add_adv`` is set, and return metrics.

        ``reward_manager/shaped_token_share`` is the share of response tokens whose advantage changed, and
        ``reward_manager/shaped_mean_change`` the mean absolute change over all response tokens.
        ``reward_manager/shaped_relative_change`` is the mean absolute change of the changed tokens divided by their
        mean absolute advantage, and is omitted if no advantage changed. Without ``add_adv``, the advantages are
        returned unchanged, without metrics.
        """
        if not self.config.add_adv:
            return advantages, {}
        shaped = shaped_advantages(advantages, response_mask, phi, self.config.kappa, self.config.shaping_placement)
        before = advantages[response_mask.bool()].double()
        change = (shaped[response_mask.bool()].double() - before).abs()
        changed = change > 0
        num_tokens = max(1, change.numel())
        metrics = {
            "reward_manager/shaped_token_share": float(changed.sum()) / num_tokens,
            "reward_manager/shaped_mean_change": float(change.sum()) / num_tokens,
        }
        if changed.any():
            relative = change[changed].sum() / before[changed].abs().sum()
            metrics["reward_manager/shaped_relative_change"] = relative.item()
        return shaped, metrics

    def update(self, scores: Tensor, rank_metrics: Mapping[str, Tensor]) -> None:
        """Move the baselines towards this batch: mu <- (1 - a) mu + a * batch mean; the first batch sets mu.

        With ``baseline_start=zero``, the baselines move towards the previous update's batch instead. In this mode, the
        first update changes no average. Later updates also move the score average towards ``scores``. If
        ``computes_phi`` is false, nothing changes.

        ``scores [B]`` are the verifiers' scores; for ``rank_metrics`` see :meth:`compute_phi`. NaN and infinite values
        are excluded from the means. If no value is finite, the average is unchanged.

        Raises:
            ValueError: See :meth:`compute_phi`.
        """
        layers = self._indicators(rank_metrics)
        if not self.config.computes_phi:
            return
        means = {
            layer: {name: mean for name, values in named.items() if (mean := _finite_mean(values)) is not None}
            for layer, named in layers.items()
        }
        if self._start is not None:
            previous, self._previous_means = self._previous_means, means
            if previous is None:
                return
            means = previous
        for layer, values in means.items():
            baselines = self._baselines.setdefault(layer, {})
            for name, mean in values.items():
                baselines[name] = self._moved(baselines.get(name, self._start), mean)
        mean_score = _finite_mean(scores)
        if mean_score is not None:
            self._ema_score = self._moved(self._ema_score, mean_score)

    @property
    def baselines(self) -> dict[str, float]:
        """Baselines of the first layer by indicator, omitting indicators without a baseline.

        After :meth:`update`, these baselines apply to the next step. :meth:`compute_phi` logs the current step's
        baselines of every layer.
        """
        known = next(iter(self._baselines.values()), {})
        baselines = {name: known.get(name, self._start) for name in self.config.followed_names}
        return {name: value for name, value in baselines.items() if value is not None}

    def state_dict(self) -> dict[str, Any]:
        """Return the averages as plain floats, which JSON represents exactly.

        The keys are ``baselines`` (including the guide's), ``ema_score`` and, with ``baseline_start=zero``,
        ``previous_means``, the means of the last batch.
        """
        state = {"baselines": deepcopy(self._baselines), "ema_score": self._ema_score}
        return state if self._start is None else state | {"previous_means": deepcopy(self._previous_means)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the output of :meth:`state_dict`. Metrics without a saved baseline start a new one.

        Raises:
            ValueError: The state is malformed (the message names the malformed part). The manager is left unchanged.
        """
        keys = ["baselines", "ema_score"] + ([] if self._start is None else ["previous_means"])
        if not isinstance(state, Mapping) or set(state) != set(keys):
            raise ValueError(
                f"reward manager state {state!r}: expected the keys {' and '.join(keys)}, "
                f"those of reward_manager.baseline_start={self.config.baseline_start}"
            )
        baselines = _checked_means(state["baselines"], "baselines")
        previous = state.get("previous_means")
        previous = None if previous is None else _checked_means(previous, "previous_means")
        score = state["ema_score"]
        # An average that does not start at zero is None until it receives a value.
        score = None if score is None and self._start is None else _finite_float(score, "ema_score")
        self._baselines, self._previous_means, self._ema_score = baselines, previous, score

    def _layer_signal(self, layer: str, indicators: dict[str, Tensor], scale: float) -> tuple[Tensor, dict[str, float]]:
        """Compute Phi ``[B]`` of one layer and the scalars to log for it."""
        config = self.config
        known = self._baselines.get(layer, {})
        baselines: dict[str, float] = {}
        for name, values in indicators.items():
            baseline = known.get(name, self._start)
            # Without a baseline or any finite value, every deviation is 0, so the fallback is arbitrary.
            baselines[name] = baseline if baseline is not None else (_finite_mean(values) or 0.0)
        by_name = {name: relative_deviation(values, baselines[name]) for name, values in indicators.items()}
        deviations = torch.stack([by_name[name] for name in config.indicator_names], dim=1)
        beta = exploration_beta(by_name[config.guide], config.hypothesis_type, config.gain)
        w_explore, w_exploit = deviations.new_tensor(config.w_explore), deviations.new_tensor(config.w_exploit)
        weights = controller_weights(beta, w_explore, w_exploit, config.hypothesis_type)
        phi = auxiliary_signal(deviations, weights, scale)
        prefix = f"reward_manager/layer_{layer}"
        metrics = {
            f"{prefix}/phi": phi.mean().item(),
            f"{prefix}/beta": beta.mean().item(),
            f"{prefix}/beta_min": beta.min().item(),
            f"{prefix}/beta_max": beta.max().item(),
        }
        for name, deviation in by_name.items():
            metrics[f"{prefix}/{name}/mu"] = baselines[name]
            metrics[f"{prefix}/{name}/deviation"] = deviation.mean().item()
        for i, name in enumerate(config.indicator_names):
            metrics[f"{prefix}/{name}/weight"] = weights[:, i].mean().item()
        return phi, metrics

    def _indicators(self, rank_metrics: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """Return each layer's indicator and guidance metrics in float64. Raises ``ValueError`` if any is missing."""
        if not rank_metrics:
            raise ValueError("rank_metrics is empty: rank shaping needs calculator.enable=true and at least one layer")
        for name in self.config.followed_names:
            if name not in rank_metrics:
                field = "indicator_names" if name in self.config.indicator_names else "guidance_metric"
                raise ValueError(
                    f"reward_manager.{field}: {name!r} is not among the metrics; "
                    f"available: {', '.join(sorted(rank_metrics))}"
                )
        return {
            str(layer): {name: metrics[name].double() for name in self.config.followed_names}
            for layer, metrics in enumerate(by_layer(rank_metrics), start=1)
        }

    def _fade(self) -> float:
        """Return the factor applied to the constant c: 1 if ``aux_fix`` is set, else 1 - (ema_score + 1) / 2.

        Before the first update, the score is treated as 0, so the factor is 1/2. Scores outside [-1, 1], which custom
        verifiers can return, do not flip the sign of the signal.
        """
        if self.config.aux_fix:
            return 1.0
        score = 0.0 if self._ema_score is None else self._ema_score
        return min(1.0, max(0.0, 1 - (score + 1) / 2))

    def _moved(self, average: float | None, mean: float) -> float:
        alpha = self.config.ema_alpha
        return mean if average is None else (1 - alpha) * average + alpha * mean


def _finite_mean(values: Tensor) -> float | None:
    """Return the mean of the finite entries, or None if there are none."""
    finite = values.double()[values.isfinite()]
    return float(finite.mean()) if finite.numel() else None


def _checked_means(means: object, where: str) -> Means:
    """Return a copy of ``means``. Raises a ``ValueError`` that names the first value that is not a finite number."""
    if not isinstance(means, Mapping):
        raise ValueError(f"reward manager state: {where}={means!r}: expected a mapping of layers")
    checked: Means = {}
    for layer, values in means.items():
        if not isinstance(layer, str) or not isinstance(values, Mapping):
            raise ValueError(f"reward manager state: {where}[{layer!r}]={values!r}: expected name to number")
        checked[layer] = {name: _finite_float(value, f"{where}[{layer!r}][{name!r}]") for name, value in values.items()}
    return checked


def _finite_float(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"reward manager state: {where}={value!r}: expected a finite number")
    return float(value)
