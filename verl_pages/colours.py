"""Colours of curves, on pages and in figures."""

CORRECT, WRONG = "#0072b2", "#d55e00"
"""Of correct and of wrong responses, everywhere and of nothing else; wrong ones are dashed or hollow besides."""

COLOURS = ("#009e73", "#b5549a", "#8a6d00", "#5b4b8a", "#4d4d4d", "#8c2d4d", "#6b8e23", "#00808a")
"""Of everything else; like those above distinct for the usual kinds of colour vision, and dark enough on white."""

SHAPES = ("circle", "square", "diamond", "triangle")
"""Markers on pages."""


def lighter(colour: str, share: float) -> str:
    """``colour``, as ``#rrggbb``, mixed with ``share`` of white."""
    channels = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(c + (255 - c) * share):02x}" for c in channels)


def page_colour(colour: str) -> str:
    """``colour`` in CSS, lighter where the page is dark."""
    return f"light-dark({colour}, {lighter(colour, 0.4)})"
