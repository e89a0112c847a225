"""Builds the page of training runs with curves, rank metrics, rank shaping, timing, options and samples."""

import re
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from verl.config.errors import ConfigError
from verl.utils.files import replace_text
from verl.utils.portable import printable
from verl_pages.colours import COLOURS, SHAPES, page_colour
from verl_pages.curves import Panel, bucket_steps, make_panels, thin
from verl_pages.distributions import histograms
from verl_pages.html import BROWSER_SCRIPTS, CHUNK_BYTES, ascii_json, has_formulas, pack, render
from verl_pages.names import metric_name
from verl_pages.options import differences, group_names, option_rows, run_names, seed_groups
from verl_pages.run_folder import METRICS, SAMPLES, RunFolder, is_run, read_run
from verl_pages.sample_files import FIGURES, METRIC_PREFIX, GatheredSamples, gather_samples, shaping_metrics
from verl_pages.samples import Limits, PromptSamples, pack_samples
from verl_pages.timeline import timeline

MAX_PAGE_BYTES = 24 << 20
"""Maximum page size in bytes. Samples that do not fit are omitted, while curves and options are always kept."""

LIMITS = Limits(characters=12_000, responses=16)
MAX_PROMPTS = 20_000

MAX_RUNS = 32

EVALUATED = "results.csv"
"""File whose presence marks a folder as an evaluation rather than a training run."""

MAX_DIFFERENCES = 5
"""Maximum number of differing options per run in the overview. The section Configuration shows all of them."""

LAST_STEPS = 10
"""Number of final steps to average in the overview, because single batches are noisy."""

SECTIONS = {
    "learning": "Learning",
    "sources": "By data source",
    "rank": "Rank metrics",
    "shaping": "Rank shaping",
    "lengths": "Lengths",
    "distributions": "Distributions in training",
    "updates": "Updates",
    "lag": "Responses of older weights",
    "speed": "Time and memory",
    "others": "All other metrics",
}


def write_page(folders: Sequence[Path], out: Path) -> list[str]:
    """Write an HTML page about the runs in ``folders`` to ``out``, and return one line per problem with the folders."""
    text, troubles = make_page(folders)
    replace_text(out, text)
    return troubles


def make_page(folders: Sequence[Path], max_bytes: int = MAX_PAGE_BYTES) -> tuple[str, list[str]]:
    """Return the page's HTML, and one line per problem with the folders."""
    runs = read_runs(folders)
    text = build_page(runs, max_bytes)
    return text, [f"{run.path}/{line}" for run in runs for line in run.troubles]


def read_runs(folders: Sequence[Path]) -> list[RunFolder]:
    """Read the runs in ``folders`` and give them distinct names.

    Raises:
        ConfigError: A folder is not a run folder and contains none, or there are too many runs.
    """
    folders = [run for folder in folders for run in runs_in(folder)]
    if len(folders) > MAX_RUNS:
        raise ConfigError(f"{len(folders)} runs: a page holds at most {MAX_RUNS}; name fewer")
    paths = [folder.resolve() for folder in folders]
    depth = 1
    while depth < 6 and len({path.parts[-depth:] for path in paths}) < len(paths):
        depth += 1
    names = [printable("/".join(path.parts[-depth:]))[-80:] for path in paths]
    runs = [read_run(folder, name) for folder, name in zip(folders, names, strict=True)]
    names = [printable(name)[-80:] for name in run_names(runs)]
    for place, (run, name) in enumerate(zip(runs, names, strict=True)):
        run.name = name if names.count(name) == 1 else f"{name} ({place + 1})"
    return runs


def runs_in(folder: Path) -> list[Path]:
    """Return ``folder`` if it is a run folder, or else all run folders up to three levels below it.

    Raises:
        ConfigError: No run folder is found.
    """
    if is_run(folder):
        return [folder]
    below = [path.parent for depth in ("*", "*/*", "*/*/*") for path in sorted(folder.glob(f"{depth}/{METRICS}"))]
    runs = [path for path in below if not (path / EVALUATED).exists()]
    if not runs:
        raise ConfigError(f"{folder}: not a run folder; it has no metrics.jsonl, no config.yaml and no samples")
    return runs


def build_page(runs: Sequence[RunFolder], max_bytes: int = MAX_PAGE_BYTES) -> str:
    """Return the page's HTML, with all text from the run folders encoded as ASCII.

    The page reloads itself in the browser while a run is unfinished.
    """
    samples = gather_samples(runs)
    for run, rows in zip(runs, samples.shaping, strict=True):
        run.metrics |= shaping_metrics(rows)
    groups, width = seed_groups(runs), bucket_steps(runs)
    panels, chunks = _pack_panels(make_panels(runs), runs, width)
    chunks.append(pack(ascii_json(option_rows(runs))))
    index: dict[str, Any] = {
        "runs": [
            _run(run, groups[place], place) | {"differs": _listed(differs)}
            for place, (run, differs) in enumerate(zip(runs, differences(runs), strict=True))
        ],
        "groups": [{"name": printable(name), **_style(place)} for place, name in enumerate(group_names(runs, groups))],
        "styles": [_style(place) for place in range(len(COLOURS))],
        "width": width,
        "last": max((run.last_step for run in runs), default=0),
        "sections": SECTIONS,
        "panels": panels,
        "options": len(chunks) - 1,
        "phases": [_phases(run) for run in runs],
        "timelines": [timeline(run) for run in runs],
        "histograms": histograms(samples.values),
    }
    unfinished = not all(run.summary for run in runs)
    if unfinished:
        index["written"] = int(time.time())
    title = f"Run: {runs[0].name}" if len(runs) == 1 else f"{len(runs)} runs"

    formulas = has_formulas(text for prompt in samples.prompts for text in prompt.texts())

    def text(chunks: Sequence[str]) -> str:
        scripts = (*BROWSER_SCRIPTS, "timeline", "histograms", "run", *(["follow"] if unfinished else []))
        connect = "'self'" if unfinished else "'none'"
        return render("run.html", title, ("base", "pages"), scripts, index, chunks, connect, formulas)

    index["samples"], packed = _samples(samples, len(chunks), max_bytes - len(text(chunks)) - 4096)
    # Collect problems last, since reading samples can add more.
    index["troubles"] = [printable(f"{run.name}/{line}") for run in runs for line in run.troubles]
    return text(chunks + packed)


def _samples(samples: GatheredSamples, first: int, room: int) -> tuple[dict[str, Any], list[str]]:
    """Return the index of the samples, and their chunks, which are numbered from ``first``."""
    figures = [*FIGURES, *(METRIC_PREFIX + name for name in samples.metrics)]
    packed = pack_samples(_by_use(samples.prompts)[:MAX_PROMPTS], figures, samples.prefixes, LIMITS, first, room)
    index = {
        "list": first,
        "noun": "prompt",
        "truth": "Ground truth",
        "order": "steps",
        "prompts": packed.count,
        "figures": [printable(metric_name(name.removeprefix(METRIC_PREFIX))) for name in figures],
        "prefixes": [
            [printable(metric_name(name + kind)) for kind in ("", " diff", " diff 2")] for name in samples.prefixes
        ],
        "verdicts": {"c": "correct", "w": "incorrect"},
        "files": f"{SAMPLES}/",
        "none": "There are no samples. Reinforcement learning keeps those of every step with trainer.samples.freq=1; "
        "supervised fine-tuning has none.",
        "hint": "Tokens have no figures here to colour them by; trainer.samples.tokens=true keeps them.",
        "limits": _limits(samples, packed.count),
    }
    return index, packed.chunks


def _limits(samples: GatheredSamples, shown: int) -> str:
    """Return a note to the reader about samples that the page omits."""
    parts = []
    if shown < len(samples.prompts) or samples.fraction < 1:
        share = samples.fraction * shown / max(1, len(samples.prompts))
        parts.append(f"To keep the page small, it has {shown:,} prompts, about {share:.0%}, the same at every step.")
    if samples.num_read < samples.num_files:
        parts.append(f"{samples.num_read:,} of {samples.num_files:,} files were read, spread over the steps.")
    if shown:
        parts.append(
            f"Of responses longer than {LIMITS.characters:,} characters the beginning and the end are shown, and of a "
            f"step at most {LIMITS.responses} responses to a prompt; {SAMPLES}/ has all of them in full."
        )
    return " ".join(parts)


def _by_use(prompts: Sequence[PromptSamples]) -> list[PromptSamples]:
    """Sort prompts by descending number of steps with samples, and alternate validation and training prompts."""

    def use(prompt: PromptSamples) -> tuple[int, int]:
        return -len(prompt.cells), zlib.crc32(f"{prompt.split} {prompt.uid}".encode())

    splits = [sorted((p for p in prompts if p.split == split), key=use) for split in ("val", "train")]
    return [prompt for pair in zip_longest(*splits) for prompt in pair if prompt is not None]


def _style(place: int) -> dict[str, str]:
    return {"colour": page_colour(COLOURS[place % len(COLOURS)]), "shape": SHAPES[place % len(SHAPES)]}


def _pack_panels(
    panels: Sequence[Panel], runs: Sequence[RunFolder], width: int
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the index of the panels, and the chunks that contain their curves."""
    index: list[dict[str, Any]] = []
    chunks: list[str] = []
    held: list[str] = []
    for number, panel in enumerate(panels):
        curves = [
            [thin(run.metrics[name], width) if name in run.metrics else None for run in runs]
            for name, _ in panel.series
        ]
        held.append(ascii_json(curves))
        index.append(
            vars(panel)
            | {
                "title": printable(panel.title),
                "series": [printable(label) for _, label in panel.series],
                "names": [printable(name) for name, _ in panel.series],
                "about": printable(panel.about),
                "nonfinite": sum(
                    int(np.isnan(run.metrics[name].values).sum())
                    for name, _ in panel.series
                    for run in runs
                    if name in run.metrics
                ),
                "chunk": len(chunks),
                "place": len(held) - 1,
            }
        )
        ends = number == len(panels) - 1 or panels[number + 1].section != panel.section
        if ends or sum(map(len, held)) >= CHUNK_BYTES:
            chunks.append(pack(f"[{','.join(held)}]"))
            held = []
    return index, chunks


def _run(run: RunFolder, group: int, place: int) -> dict[str, Any]:
    """Return a run's row in the overview."""
    planned = run.option("trainer.total_training_steps")
    # Only complete runs have a summary, and only runs of newer versions have a start.
    facts = run.start | run.summary
    versions = facts.get("versions")
    return {
        "name": run.name,
        "group": group,
        **_style(place),
        "complete": bool(run.summary),
        "steps": run.last_step,
        "planned": int(planned) if planned and planned.isdigit() else None,
        "seed": run.option("seed"),
        "model": printable("/".join((run.option("model.path") or "").rstrip("/").split("/")[-2:]))[-60:],
        "estimator": printable(run.option("algorithm.adv_estimator") or ""),
        "shaping": _shaping(run),
        "version": printable(str(versions.get("verl", "")))[:40] if isinstance(versions, Mapping) else "",
        "revision": printable(re.sub(r"^(\w{10})\w*", r"\1", str(facts.get("git_revision") or "")))[:50],
        "host": printable(str(facts.get("host") or ""))[:60],
        "started": printable(str(facts.get("started") or ""))[:30].replace("T", " ").replace("+00:00", " UTC"),
        "command": printable(" ".join(run.overrides))[:2000],
        "figures": dict(overview_figures(run)),
    }


def _shaping(run: RunFolder) -> str:
    """Describe what a run's rank shaping applies to. Return an empty string if the options are unknown."""
    places = {"reward_manager.add_reward": "of rewards", "reward_manager.add_adv": "of advantages"}
    if not places.keys() <= run.options.keys():
        return ""
    return " and ".join(place for name, place in places.items() if run.option(name) == "true") or "off"


def _listed(differences: Sequence[str]) -> str:
    more = len(differences) - MAX_DIFFERENCES
    return printable(", ".join(differences[:MAX_DIFFERENCES]) + (f" and {more} more" if more > 0 else ""))


def overview_figures(run: RunFolder) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of the metrics in a run's overview. Validations are ``[pass@1, step]``."""

    def values(name: str) -> Any:
        series = run.metrics.get(name)
        return None if series is None else series.values[np.isfinite(series.values)]

    for label, name in {
        "score": "score/mean",
        "reward": "critic/rewards/mean",
        "training": "train/pass@1",
        "tokens": "response_length/mean",
        "er": "cal/overall/layer_1/Effective Rank/mean",
        "erv": "cal/overall/layer_1/Effective Rank diff/mean",
        "era": "cal/overall/layer_1/Effective Rank diff 2/mean",
        "seconds": "timing_s/step",
        "throughput": "perf/throughput",
        "loss": "train/loss",
    }.items():
        recorded = values(name)
        if recorded is not None and len(recorded):
            yield label, float(f"{recorded[-LAST_STEPS:].mean():.6g}")
    total = values("timing_s/step")
    if total is not None:
        yield "total", float(total.sum())
    series = run.metrics.get("val/pass@1")
    if series is not None and np.isfinite(series.values).any():
        finite = np.isfinite(series.values)
        passes, steps = series.values[finite], series.steps[finite]
        for label, place in {"first": 0, "last": -1, "best": passes.argmax()}.items():
            yield label, [float(passes[place]), int(steps[place])]


def _phases(run: RunFolder) -> dict[str, float]:
    """Return the total number of seconds per phase, over all steps."""
    sums = {
        name.removeprefix("timing_s/"): float(np.nansum(series.values))
        for name, series in run.metrics.items()
        if name.startswith("timing_s/") and name != "timing_s/step"
    }
    return {printable(name): round(sums[name], 3) for name in sorted(sums, key=lambda name: -sums[name])[:24]}
