"""Who was busy in the last steps of a run: the engines that sample, and the trainer."""

from typing import Any

import numpy as np

from verl_pages.run_folder import RunFolder

NUM_STEPS = 16
"""Steps that a timeline shows."""

Span = tuple[float, float]
"""From and to, in seconds since the step began."""


def timeline(run: RunFolder) -> dict[str, Any]:
    """Return the last steps of a run that samples, for the timeline.

    ``steps`` lists step, seconds, the spans in which engines were busy, and those in which the trainer was; ``busy`` is
    the share of these steps for engines and trainer. Empty for a run that does not sample.

    Order within a step is that of the loop: sampling, learning, validation. What is logged is how long each took, not
    when it began; engines of their own sample the next step from the beginning of this one.
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
    """``seconds``: by phase, and of the whole ``step``."""
    whole, sampling, validation = seconds["step"], seconds["gen"], seconds.get("testing", 0.0)
    # What ran beside the step's own phases is no part of its time.
    beside = sum(seconds.values()) - 2 * whole - seconds.get("engine_wait", 0.0)
    first = min(max(sampling - max(beside, 0.0), 0.0), whole)
    end = max(whole - validation, first)
    waited = seconds.get("trainer_wait", 0.0)
    engines = [(0.0, min(sampling, end)), (end, whole)]
    trainer = [(first, max(first, end - waited))]
    return [step, round(whole, 4), _long(engines), _long(trainer)]


def _long(spans: list[Span]) -> list[Span]:
    """Those that last, rounded."""
    return [(round(start, 4), round(stop, 4)) for start, stop in spans if stop - start > 1e-4]
