"""Curves on a page: which panels there are, and metrics thinned to what a screen can show."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from verl_pages.run_folder import RunFolder, Series

MAX_POINTS = 400
"""Points of a curve. With more steps, each point stands for as many steps as it needs to."""

MAX_OTHERS = 600
"""Panels of metrics that no section names."""

RANK_NAMES = {
    "Effective Rank": "ER, effective rank",
    "Effective Rank diff": "ERV, its velocity",
    "Effective Rank diff 2": "ERA, its acceleration",
}
"""The metrics of the paper, which stand first."""


@dataclass(frozen=True)
class Panel:
    """One chart."""

    section: str
    title: str
    series: tuple[tuple[str, str], ...]
    """Metric and what the legend calls it."""
    percent: bool = False
    layer: str = ""
    """Shown if this layer is chosen; empty: always."""
    log: bool = False


def bucket_steps(runs: Sequence[RunFolder]) -> int:
    """How many steps a point of a curve stands for, on a page with these runs."""
    return max(run.last_step for run in runs) // MAX_POINTS + 1 if runs else 1


def thin(series: Series, width: int) -> list[list[Any]]:
    """The points of a curve: ``[steps, means]`` and, if steps share a point, the lowest and highest of each.

    Points are at the mean of their finite steps' places; no peak is lost.
    """
    finite = np.isfinite(series.values)
    steps, values = series.steps[finite], series.values[finite]
    if width == 1 or len(steps) == 0:
        return [steps.tolist(), _rounded(values)]
    starts = np.flatnonzero(np.diff(steps // width, prepend=-1))
    counts = np.diff(np.append(starts, len(steps)))
    middle = np.add.reduceat(steps, starts) / counts
    # Halves first: the sum of numbers near the largest one would not be finite.
    means = np.add.reduceat(values / counts.repeat(counts), starts)
    lows, highs = np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)
    return [np.round(middle, 1).tolist(), _rounded(means), _rounded(lows), _rounded(highs)]


def _rounded(values: Any) -> list[float]:
    """To six digits, which no screen tells from all."""
    return [float(f"{value:.6g}") for value in values]


def make_panels(runs: Sequence[RunFolder]) -> list[Panel]:
    """The panels with data, by section; each metric is in one, the others are in the last section."""
    names = sorted({name for run in runs for name in run.metrics})
    panels = [panel for panel in _all_panels(names) if panel.series]
    shown = {name for panel in panels for name, _ in panel.series}
    others = [name for name in names if name not in shown][:MAX_OTHERS]
    return panels + [Panel("others", name, ((name, ""),)) for name in others]


def _all_panels(names: Sequence[str]) -> Iterator[Panel]:
    yield from _learning(names)
    yield from _sources(names)
    yield from _lengths(names)
    yield from _updates(names)
    yield from _rank(names)
    yield from _shaping(names)
    yield from _speed(names)


def _of(names: Sequence[str], **labels: str) -> tuple[tuple[str, str], ...]:
    """Those metrics of ``label=name`` that there are; ``_`` in a label is a space."""
    return tuple((name, label.strip("_").replace("_", " ")) for label, name in labels.items() if name in set(names))


def _matching(names: Sequence[str], pattern: str) -> tuple[tuple[str, str], ...]:
    """Metrics that match all of ``pattern``, each called by its group, numbers in their order."""
    found = [(name, match[1]) for name in names if (match := re.fullmatch(pattern, name))]
    return tuple(sorted(found, key=lambda pair: [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", pair[1])]))


def _learning(names: Sequence[str]) -> Iterator[Panel]:
    def panel(title: str, percent: bool = False, **labels: str) -> Panel:
        return Panel("learning", title, _of(names, **labels), percent)

    yield panel("Correct responses, pass@1", True, training="train/pass@1", validation="val/pass@1")
    yield panel("Verifiers' score", training="score/mean", validation="val/score/mean")
    yield Panel("learning", "Validation, pass@k", _matching(names, r"val/(pass@(?!1$)\d+)"), True)
    best = _matching(names, r"val/((?:best|worst|maj)@\d+)/mean")
    yield Panel("learning", "Validation, best, worst and vote of k", best)
    yield panel("Reward that advantages are made of", training="critic/rewards/mean", validation="val/rewards/mean")
    yield panel("Loss (supervised)", training="train/loss", validation="val/loss")
    yield panel("Probability of held-out answers", True, validation="val/sequence_probability")
    yield panel(
        "Prompts that teach nothing",
        True,
        all_responses_have_the_same_score="train/groups_without_variance",
    )
    yield panel("Batches sampled for a step", batches="train/num_gen_batches")
    yield Panel("learning", "Extras of the reward function", _matching(names, r"train/reward_extra/(.+)/mean"))
    yield Panel("learning", "Verdicts in training, responses", _matching(names, r"verifier/(.+)"))
    yield Panel("learning", "Verdicts in validation, responses", _matching(names, r"val/verifier/(.+)"))


def _sources(names: Sequence[str]) -> Iterator[Panel]:
    sources = {match[1] for name in names if (match := re.fullmatch(r"(?:train|val)/(.+)/pass@1", name))}
    for source in sorted(sources):
        kinds = (("pass@1", "pass@1", True), ("score", "score/mean", False), ("reward", "rewards/mean", False))
        for title, metric, percent in kinds:
            both = {"training": f"train/{source}/{metric}", "validation": f"val/{source}/{metric}"}
            yield Panel("sources", f"{source}: {title}", _of(names, **both), percent)


def _lengths(names: Sequence[str]) -> Iterator[Panel]:
    for where, prefix in (("Training", ""), ("Validation", "val/")):
        lengths = f"{prefix}response_length"
        found = _of(
            names,
            all=f"{lengths}/mean",
            correct=f"{lengths}/correct/mean",
            incorrect=f"{lengths}/incorrect/mean",
        )
        yield Panel("lengths", f"{where}: tokens of a response, mean", found)
        found = _of(
            names,
            all=f"{lengths}/clip_ratio",
            correct=f"{lengths}/correct/clip_ratio",
            incorrect=f"{lengths}/incorrect/clip_ratio",
        )
        yield Panel("lengths", f"{where}: cut at the length limit", found, True)
    yield Panel(
        "lengths",
        "Training: longest and shortest response, tokens",
        _of(names, longest="response_length/max", shortest="response_length/min"),
    )


def _updates(names: Sequence[str]) -> Iterator[Panel]:
    def panel(title: str, percent: bool = False, log: bool = False, **labels: str) -> Panel:
        return Panel("updates", title, _of(names, **labels), percent, log=log)

    yield panel("Entropy of the policy, nats per token", rollout="actor/entropy", update="actor/entropy_loss")
    yield panel(
        "KL divergence, nats per token",
        from_the_reference="actor/kl_loss",
        from_the_reference_in_the_reward="actor/reward_kl_penalty",
        of_the_update="actor/ppo_kl",
    )
    yield panel(
        "Gradient norm before clipping",
        policy="actor/grad_norm",
        critic="critic/grad_norm",
        model="train/grad_norm",
    )
    yield panel("Policy loss", loss="actor/pg_loss")
    yield panel("Tokens on which the clip acts", True, clip="actor/pg_clipfrac", dual_clip="actor/pg_clipfrac_lower")
    yield panel("Learning rate", policy="actor/lr", critic="critic/lr", model="train/lr")
    yield panel(
        "Updates skipped",
        policy="actor/skipped_updates",
        critic="critic/skipped_updates",
        model="train/skipped_updates",
    )
    yield panel(
        "Rollout agreement: distance of log-probabilities, nats",
        log=True,
        mean="rollout/logprob_abs_diff",
        largest="rollout/logprob_abs_diff_max",
    )
    yield panel(
        "Rollout agreement: KL of engine and trainer, nats per token",
        k1="rollout_corr/kl",
        k3="rollout_corr/k3_kl",
    )
    yield panel("Rollout agreement: effective sample size", True, share="rollout_corr/rollout_is_eff_sample_size")
    yield panel("Value loss", loss="critic/vf_loss")
    yield panel("Variance that the critic explains", True, explained="critic/vf_explained_var")


def _rank(names: Sequence[str]) -> Iterator[Panel]:
    pattern = r"(?:val/)?cal/(?:overall|correct|incorrect)/(layer_\d+)/(.+)/mean"
    found = {match.groups() for name in names if (match := re.fullmatch(pattern, name))}
    order = list(RANK_NAMES)
    for layer, metric in sorted(
        found, key=lambda pair: (_number(pair[0]), order.index(pair[1]) if pair[1] in order else 99, pair[1])
    ):
        for where, prefix in (("training", ""), ("validation", "val/")):
            groups = {
                "correct": f"{prefix}cal/correct/{layer}/{metric}/mean",
                "incorrect": f"{prefix}cal/incorrect/{layer}/{metric}/mean",
                "all": f"{prefix}cal/overall/{layer}/{metric}/mean",
            }
            yield Panel("rank", f"{RANK_NAMES.get(metric, metric)}, {where}", _of(names, **groups), layer=layer)
    for layer in sorted({layer for layer, _ in found}, key=_number):
        for kind, title in (
            ("global", "of the mean states of a batch"),
            ("cumulative", "over the responses of a batch"),
        ):
            for metric in sorted({m[1] for n in names if (m := re.fullmatch(rf"(?:val/)?cal/{layer}/{kind}/(.+)", n))}):
                both = {"training": f"cal/{layer}/{kind}/{metric}", "validation": f"val/cal/{layer}/{kind}/{metric}"}
                yield Panel("rank", f"{_short(metric)} {title}", _of(names, **both), layer=layer)


def _shaping(names: Sequence[str]) -> Iterator[Panel]:
    prefix = "reward_manager"
    phi = _of(names, mean=f"{prefix}/phi_mean", lowest=f"{prefix}/phi_min", highest=f"{prefix}/phi_max")
    yield Panel("shaping", "Phi, the auxiliary signal", phi)
    layers = sorted({m[1] for n in names if (m := re.fullmatch(rf"{prefix}/(layer_\d+)/.+", n))}, key=_number)
    for layer in layers:
        own = f"{prefix}/{layer}"
        beta = _of(names, mean=f"{own}/beta", lowest=f"{own}/beta_min", highest=f"{own}/beta_max")
        yield Panel("shaping", "Beta, weight of exploration", beta, layer=layer)
    yield Panel("shaping", "Factor on Phi", _of(names, factor=f"{prefix}/scale"))
    yield Panel("shaping", "Tokens whose advantage was changed", _of(names, share=f"{prefix}/shaped_token_share"), True)
    yield Panel(
        "shaping", "Change of the advantages, absolute, mean", _of(names, all_tokens=f"{prefix}/shaped_mean_change")
    )
    yield Panel(
        "shaping",
        "Change relative to the advantages, of changed tokens",
        _of(names, mean=f"{prefix}/shaped_relative_change"),
        True,
    )
    yield Panel(
        "shaping",
        "Advantages of tokens, mean",
        _of(names, before_shaping="critic/advantages_0/mean", after_shaping="critic/advantages/mean"),
    )
    for layer in layers:
        for metric in ("weight", "deviation", "mu"):
            title = {
                "weight": "Weights of the indicators",
                "deviation": "Deviation of the indicators from their baselines",
                "mu": "Baselines of the indicators",
            }[metric]
            found = _matching(names, rf"{prefix}/{layer}/(.+)/{metric}")
            yield Panel("shaping", title, tuple((name, _short(label)) for name, label in found), layer=layer)


def _speed(names: Sequence[str]) -> Iterator[Panel]:
    yield Panel("speed", "Seconds of a step", _of(names, step="timing_s/step"))
    yield Panel("speed", "Throughput, tokens per second and worker", _of(names, whole_step="perf/throughput"))
    phases = tuple(pair for pair in _matching(names, r"timing_s/(.+)") if pair[1] != "step")
    yield Panel("speed", "Seconds by phase", phases)
    yield Panel("speed", "Peak memory by phase, GB", _matching(names, r"perf/memory/(.+(?<!reserved))_gb"))
    yield Panel("speed", "Speed of the model, share of the device's peak", _matching(names, r"perf/mfu/(.+)"), True)
    yield Panel("speed", "Model operations, 10¹² per second and worker", _matching(names, r"perf/tflops/(.+)"))


def _short(metric: str) -> str:
    """ER, ERV and ERA for the metrics of the paper."""
    return RANK_NAMES[metric].partition(",")[0] if metric in RANK_NAMES else metric


def _number(layer: str) -> int:
    return int(layer.removeprefix("layer_"))
