"""Curves on a page: which panels there are, and metrics thinned to the resolution of a screen."""

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
"""Most points of a curve. With more steps, each point averages several."""

MAX_OTHERS = 600
"""Most panels of metrics that ``panels.yaml`` does not name."""


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
    about: str = ""
    """What the chart shows."""
    named: bool = False
    """The legend has names that are not in the title: one series has a legend, too."""


PARTS = {"split": "(?:val/)?", "layer": r"layer_\d+", "metric": ".+", "series": ".+", "source": ".+"}
"""Patterns of the parts of metrics' names that ``panels.yaml`` calls ``<split>`` and so on."""


def bucket_steps(runs: Sequence[RunFolder]) -> int:
    """Return the number of steps that each point of a curve averages."""
    return max(run.last_step for run in runs) // MAX_POINTS + 1 if runs else 1


def thin(series: Series, width: int) -> list[list[Any]]:
    """Return the points of a curve: ``[steps, means]`` and, if steps share a point, the lowest and highest of each.

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
    """Round to six digits, more than a screen can show."""
    return [float(f"{value:.6g}") for value in values]


def make_panels(runs: Sequence[RunFolder]) -> list[Panel]:
    """Return the panels with data, by section; metrics that no panel names are in the last section."""
    names = sorted({name for run in runs for name in run.metrics})
    sections = yaml.safe_load((ASSETS / "panels.yaml").read_text(encoding="utf-8"))
    panels = [p for section, kinds in sections.items() for kind in kinds for p in _panels_of(section, kind, names)]
    # Those of a data source stand together.
    panels.sort(key=lambda panel: (panel.section == "sources", panel.title if panel.section == "sources" else ""))
    shown = {name for panel in panels for name, _ in panel.series}
    others = [name for name in names if name not in shown][:MAX_OTHERS]
    return panels + [Panel("others", name, ((name, ""),)) for name in others]


def _panels_of(section: str, kind: Mapping[str, Any], names: Sequence[str]) -> list[Panel]:
    """One panel for each title and layer that the names of metrics make of an entry of ``panels.yaml``."""
    panels: dict[tuple[Any, ...], Panel] = {}
    for label, template in kind["series"].items():
        pattern = re.sub(r"(?<!P)<(\w+)>", lambda part: f"(?P<{part[1]}>{PARTS[part[1]]})", template)
        matches = [match for name in names if (match := re.fullmatch(pattern, name))]
        for match in sorted(matches, key=lambda match: _by_number(match.groupdict().get("series", ""))):
            parts = dict.fromkeys(PARTS, "") | match.groupdict()
            metric = parts["metric"]
            # Order of the panels: by layer, the paper's metrics first, training before validation.
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
    """Sorts "pass@8" before "pass@16"."""
    return tuple((not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", text))
