"""Selects the panels of a page and downsamples their curves to screen resolution."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import yaml

from verl_pages.html import ASSETS
from verl_pages.names import RANK_NAMES, metric_name
from verl_pages.run_folder import RunFolder, Series

MAX_POINTS = 400
"""Maximum number of points per curve. In longer runs, each point averages several steps."""

MAX_OTHERS = 600
"""Maximum number of panels for metrics that are not in ``panels.yaml``."""


@dataclass(frozen=True)
class Panel:
    """One chart on a page."""

    section: str
    title: str
    series: tuple[tuple[str, str], ...]
    """Metric name and legend label of each series."""
    percent: bool = False
    layer: str = ""
    """Layer for which the panel is shown, or an empty string to show the panel for all layers."""
    log: bool = False
    about: str = ""
    """Description of the chart."""
    named: bool = False
    """Whether to show a legend even for a single series, because its label adds information to the title."""


PARTS = {"split": "(?:val/)?", "layer": r"layer_\d+", "metric": ".+", "series": ".+", "source": ".+"}
"""Maps placeholders in the metric names of ``panels.yaml``, such as ``<split>``, to regular expressions."""


def bucket_steps(runs: Sequence[RunFolder]) -> int:
    """Return the number of steps that each point of a curve averages."""
    return max(run.last_step for run in runs) // MAX_POINTS + 1 if runs else 1


def thin(series: Series, width: int) -> list[list[Any]]:
    """Return a curve's points as ``[steps, means]``, followed by minima and maxima if a point covers several steps.

    A point covers ``width`` steps, and its position is the mean of the steps with finite values. The extrema preserve
    peaks.
    """
    finite = np.isfinite(series.values)
    steps, values = series.steps[finite], series.values[finite]
    if width == 1 or len(steps) == 0:
        return [steps.tolist(), _rounded(values)]
    starts = np.flatnonzero(np.diff(steps // width, prepend=-1))
    counts = np.diff(np.append(starts, len(steps)))
    middle = np.add.reduceat(steps, starts) / counts
    # Divide before summing, since a sum of very large values could overflow.
    means = np.add.reduceat(values / counts.repeat(counts), starts)
    lows, highs = np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)
    return [np.round(middle, 1).tolist(), _rounded(means), _rounded(lows), _rounded(highs)]


def _rounded(values: Any) -> list[float]:
    """Round values to six significant digits, which is finer than the screen's resolution."""
    return [float(f"{value:.6g}") for value in values]


def make_panels(runs: Sequence[RunFolder]) -> list[Panel]:
    """Return the panels that have data, ordered by section. The last section contains metrics without a panel entry."""
    names = sorted({name for run in runs for name in run.metrics})
    sections = yaml.safe_load((ASSETS / "panels.yaml").read_text(encoding="utf-8"))
    panels = [p for section, kinds in sections.items() for kind in kinds for p in _panels_of(section, kind, names)]
    # Group panels by data source.
    panels.sort(key=lambda panel: (panel.section == "sources", panel.title if panel.section == "sources" else ""))
    shown = {name for panel in panels for name, _ in panel.series}
    others = [name for name in names if name not in shown][:MAX_OTHERS]
    return panels + [Panel("others", name, ((name, ""),)) for name in others]


def _panels_of(section: str, kind: Mapping[str, Any], names: Sequence[str]) -> list[Panel]:
    """Expand an entry of ``panels.yaml`` to one panel per title and layer that occur in the metric names."""
    panels: dict[tuple[Any, ...], Panel] = {}
    for label, template in kind["series"].items():
        pattern = re.sub(r"(?<!P)<(\w+)>", lambda part: f"(?P<{part[1]}>{PARTS[part[1]]})", template)
        matches = [match for name in names if (match := re.fullmatch(pattern, name))]
        for match in sorted(matches, key=lambda match: _by_number(match.groupdict().get("series", ""))):
            parts = dict.fromkeys(PARTS, "") | match.groupdict()
            metric = parts["metric"]
            # Sort panels by layer, with the paper's metrics first and training before validation.
            first = list(RANK_NAMES).index(metric) if metric in RANK_NAMES else len(RANK_NAMES)
            order = (_by_number(parts["layer"]), first, metric, parts["split"], parts["source"])
            parts["split"] = "validation" if parts["split"] else "training"
            parts |= {"short": metric_name(metric), "series": metric_name(parts["series"])}
            parts["metric"] = ", ".join(RANK_NAMES.get(metric, (metric_name(metric),)))
            title = _filled(kind["title"], parts)
            if not kind["title"].startswith("<source>"):
                title = title[:1].upper() + title[1:]
            looks = (
                kind.get("percent", False),
                parts["layer"],
                kind.get("log", False),
                _filled(kind["about"], parts),
                "<series>" in label,
            )
            panel = panels.get(order, Panel(section, title, (), *looks))
            panels[order] = replace(panel, series=(*panel.series, (match[0], _filled(label, parts))))
    return [panels[order] for order in sorted(panels)]


def _filled(template: str, parts: Mapping[str, str]) -> str:
    return re.sub(r"<(\w+)>", lambda match: parts[match[1]], template)


def _by_number(text: str) -> tuple[tuple[bool, int, str], ...]:
    """Return a sort key with which numbers are ordered by value, so that "pass@8" precedes "pass@16"."""
    return tuple((not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", text))
