"""The metric names of the paper's release, beside ours (``trainer.log_release_names``); docs/metrics.md has the table.

The release's first and its later versions name some numbers differently; both names are here.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

from verl.config.rewards import RewardManagerConfig

GROUP = "(overall|correct|incorrect)"

NAMES = {
    r"(val/)?response_length/(mean|max|min|clip_ratio)": [r"\1response_length/overall/\2"],
    rf"(val/)?cal/{GROUP}/(layer_\d+)/([^/]+)/(mean|max|min)": [r"\1cal/\3/\4/\2/\5"],
    r"reward_manager/scale": ["reward_manager/performance_scaling_factor_mean"],
    r"reward_manager/layer_1/beta": ["reward_manager/diff_2_tendency_mean"],
}
"""Our name, as a pattern -> the release's names."""

SOURCE_NAMES = {
    r"pass@1": ["test_correctness/SOURCE", "SOURCE/test_correctness", "SOURCE/pass@1"],
    r"score/mean": ["test_score_0/SOURCE", "SOURCE/test_score_0"],
    r"rewards/mean": ["test_score/SOURCE", "SOURCE/test_score"],
    r"response_length/mean": ["test_overall_len/SOURCE", "SOURCE/test_overall_len"],
    r"response_length/(correct|incorrect)/mean": [r"test_\1_len/SOURCE", r"SOURCE/test_\1_len"],
    rf"cal/{GROUP}/(layer_\d+)/([^/]+)/mean": [r"cal_\1/SOURCE/\2/\3", r"SOURCE/\2/\3/\1"],
    r"cal/(layer_\d+)/(global|cumulative)/([^/]+)": [r"SOURCE/\1/\2/\3"],
}
"""The same for the validation of one data source; all names follow ``val/``."""


def release_names(
    metrics: Mapping[str, float], shaping: RewardManagerConfig, baselines: Mapping[str, float], sources: Sequence[str]
) -> dict[str, float]:
    """The release's names for what is in ``metrics``.

    Args:
        metrics: one step, under our names.
        shaping: names the indicators and the guide.
        baselines: of the first layer after the step, by indicator.
        sources: the data sources of the validation prompts. With a single one, all of ``val/`` is that source's.
    """
    extra: dict[str, float] = {}
    for name, value in metrics.items():
        extra |= dict.fromkeys(_translated(name, NAMES), value)
    for prefix in ("", "val/"):
        if f"{prefix}cal/num_correct" in metrics:
            correct, incorrect = (metrics[f"{prefix}cal/num_{group}"] for group in ("correct", "incorrect"))
            extra[f"{prefix}cal/accuracy"] = correct / (correct + incorrect)
    if "reward_manager/phi_mean" in metrics:
        extra |= {f"cal/base_v/{name}": value for name, value in baselines.items()}
        for ours, theirs in _indicator_names(shaping):
            if ours in metrics:
                extra[theirs] = metrics[ours]
    for source in sources:
        extra |= _source_names(metrics, source, "val/" if len(sources) == 1 else f"val/{source}/")
    return extra


def _indicator_names(shaping: RewardManagerConfig) -> Iterator[tuple[str, str]]:
    """Our names and the release's for the terms of Phi; the release has one layer."""
    ours, theirs = "reward_manager/layer_1", "reward_manager"
    yield f"{ours}/{shaping.guide}/deviation", f"{theirs}/percentage_deviation_mean"
    for name in shaping.indicator_names:
        slug = name.lower().replace(" ", "_")
        yield f"{ours}/{name}/weight", f"{theirs}/weight_{slug}_mean"
        yield f"{ours}/{name}/deviation", f"{theirs}/relative_deviation_{slug}_mean"


def _source_names(metrics: Mapping[str, float], source: str, prefix: str) -> dict[str, float]:
    """The names for one data source, whose metrics begin with ``prefix``."""
    own = {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}
    if "score/mean" in own:
        # Without auxiliary rewards, rewards are scores.
        own.setdefault("rewards/mean", own["score/mean"])
    extra = {}
    for name, value in own.items():
        for translated in _translated(name, SOURCE_NAMES):
            extra["val/" + translated.replace("SOURCE", source)] = value
    return extra


def _translated(name: str, table: Mapping[str, Sequence[str]]) -> Iterator[str]:
    for pattern, templates in table.items():
        if match := re.fullmatch(pattern, name):
            yield from (match.expand(template) for template in templates)
