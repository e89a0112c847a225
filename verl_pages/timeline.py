"""Builds a timeline of engine and trainer activity in the last steps of a run."""

from typing import Any

import numpy as np

from verl_pages.run_folder import RunFolder

NUM_STEPS = 16
"""Maximum number of steps in a timeline."""

Span = tuple[float, float]
"""Start and end, in seconds since the beginning of the step."""


def timeline(run: RunFolder) -> dict[str, Any]:
    """Return the timeline of a run's last steps, or an empty dict if the run samples no responses.

    Each entry of ``steps`` contains a step's number, its duration in seconds, and the busy spans of engines and
    trainer. ``busy`` contains the fractions of the total time in which each of them was busy.

    Only durations are logged, so start times are inferred from the order of phases in a step: sampling, learning,
    validation. Separate engines start sampling for the next step when the current step begins.
    """
    seconds = {
        name.removeprefix("timing_s/"): dict(
            zip(series.steps.tolist(), np.nan_to_num(series.values).tolist(), strict=True)
        )
        for name, series in run.metrics.items()
        if name.startswith("timing_s/")
    }
    if not {"gen", "step"} <= seconds.keys():
        return {}
    steps = [step for step, whole in sorted(seconds["step"].items()) if step and whole > 0][-NUM_STEPS:]
    rows = [_row(step, {name: values.get(step, 0.0) for name, values in seconds.items()}) for step in steps]
    total = sum(row[1] for row in rows)
    if not total:
        return {}
    busy = [sum(stop - start for row in rows for start, stop in row[lane]) / total for lane in (2, 3)]
    return {"steps": rows, "busy": [round(share, 4) for share in busy]}


def _row(step: int, seconds: dict[str, float]) -> list[Any]:
    """Return the timeline entry of a step. ``seconds`` has the duration of each phase and of the whole ``step``."""
    whole, sampling, validation = seconds["step"], seconds["gen"], seconds.get("testing", 0.0)
    # Phases that ran in parallel do not add to the step's duration.
    beside = sum(seconds.values()) - 2 * whole - seconds.get("engine_wait", 0.0)
    first = min(max(sampling - max(beside, 0.0), 0.0), whole)
    end = max(whole - validation, first)
    waited = seconds.get("trainer_wait", 0.0)
    engines = [(0.0, min(sampling, end)), (end, whole)]
    trainer = [(first, max(first, end - waited))]
    return [step, round(whole, 4), _long(engines), _long(trainer)]


def _long(spans: list[Span]) -> list[Span]:
    """Round the spans, and drop those of negligible length."""
    return [(round(start, 4), round(stop, 4)) for start, stop in spans if stop - start > 1e-4]
