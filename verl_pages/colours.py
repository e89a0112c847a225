"""Colours of curves, on pages and in figures."""

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a6d00", "#56b4e9", "#5b4b8a", "#4d4d4d")
"""After Okabe and Ito: distinct for every kind of colour vision, and dark enough for lines on white."""

SHAPES = ("circle", "square", "diamond", "triangle")
"""Markers on pages."""


def lighter(colour: str, share: float) -> str:
    """``colour``, as ``#rrggbb``, mixed with ``share`` of white."""
    channels = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(c + (255 - c) * share):02x}" for c in channels)
