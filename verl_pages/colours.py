"""Colours and markers of curves on pages and in figures."""

CORRECT, WRONG = "#0072b2", "#d55e00"
"""Colours reserved for correct and wrong responses. Wrong responses are also drawn dashed or hollow."""

COLOURS = ("#009e73", "#b5549a", "#8a6d00", "#5b4b8a", "#4d4d4d", "#8c2d4d", "#6b8e23", "#00808a")
"""Colours for other curves, chosen for contrast on white and for common forms of colour blindness."""

SHAPES = ("circle", "square", "diamond", "triangle")
"""Marker shapes on pages."""


def lighter(colour: str, share: float) -> str:
    """Return ``colour`` (``#rrggbb``) lightened by mixing in a ``share`` of white."""
    channels = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(c + (255 - c) * share):02x}" for c in channels)


def page_colour(colour: str) -> str:
    """Return a CSS colour value for ``colour`` that is lighter in dark mode."""
    return f"light-dark({colour}, {lighter(colour, 0.4)})"
