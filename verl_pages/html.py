"""One HTML page that loads nothing from elsewhere: its template, scripts, styles and data.

Text of models, data sets and options is hostile. A page with scripts contains it only as ASCII JSON without ``<``,
``>`` and ``&``, or compressed and in base64; the scripts put it into the document as text nodes. Everything else is
escaped by the template, and the page's policy forbids all other scripts and all connections.
"""

import base64
import hashlib
import json
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from verl.utils.portable import finite_or_null, printable

CHUNK_BYTES = 1 << 19
"""Uncompressed size at which a chunk is closed. A page unpacks a chunk when something in it is opened."""

BROWSER_SCRIPTS = ("base", "list", "charts", "panels", "diff", "text", "tokens", "samples")
"""Scripts of pages with charts and the browser of responses."""

ASSETS = Path(__file__).parent / "assets"
KATEX = ASSETS / "katex"

FORMULA = re.compile(r"\\[(\[]|\\begin\{|\$[^$\n]*[\\^_=+*/<>-][^$\n]*\$|\$\$")
"""What may begin a formula, or be one; ``text.js`` decides."""

TEMPLATES = Environment(
    loader=FileSystemLoader(ASSETS), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
)


def render(
    template: str,
    title: str,
    styles: Sequence[str],
    scripts: Sequence[str] = (),
    index: Mapping[str, Any] | None = None,
    chunks: Sequence[str] = (),
    connect: str = "'none'",
    formulas: bool = False,
    **values: Any,
) -> str:
    """Return the text of a page.

    Args:
        template: file in ``assets/`` that extends ``page.html``.
        title: of the page.
        styles: names of its style sheets.
        scripts: names of its scripts, which share one scope; none: the page runs no script.
        index: what the scripts read at once.
        chunks: what they unpack when it is needed, as :func:`pack` returns it.
        connect: source of a content security policy that the scripts may connect to.
        formulas: KaTeX is part of the page.
        values: what else the template needs.
    """
    style = _read(styles, "css") + (_katex_style() if formulas else "")
    script = '"use strict";\n(() => {\n' + _read(scripts, "js") + "\n})();\n" if scripts else ""
    if formulas:
        script = f"/* KaTeX. {' '.join((KATEX / 'LICENSE').read_text('utf-8').split())} */\n" + (
            (KATEX / "katex.min.js").read_text("utf-8") + script
        )
    policy = f"default-src 'none'; style-src {_digest(style)}; base-uri 'none'; form-action 'none'; " + (
        f"script-src {_digest(script)}; connect-src {connect}" if scripts else "img-src data:"
    )
    fonts = _katex_fonts() if formulas else []
    parts = {"links": [], **values, "fonts": fonts, "policy": Markup(policy), "title": printable(title)}
    inline = {"style": style, "script": script, "data": ascii_json(index)}
    trusted = {name: Markup(text) for name, text in inline.items()}
    return TEMPLATES.get_template(template).render(**parts, **trusted, chunks=[Markup(chunk) for chunk in chunks])


def ascii_json(value: Any) -> str:
    """ASCII JSON that cannot end a script element: no ``<``, ``>`` or ``&``; numbers that are not finite are null."""
    text = json.dumps(finite_or_null(value), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def pack(text: str) -> str:
    """ASCII ``text``, compressed and in base64."""
    return base64.b64encode(zlib.compress(text.encode("ascii"), 6)).decode("ascii")


def has_formulas(texts: Iterable[str]) -> bool:
    """Whether a page of these texts needs KaTeX."""
    return any(FORMULA.search(text) for text in texts)


def _katex_style() -> str:
    """Without the addresses of fonts: ``text.js`` loads these from the page itself."""
    return re.sub(r"@font-face\{[^}]*\}", "", (KATEX / "katex.min.css").read_text("utf-8"))


def _katex_fonts() -> list[tuple[str, str, str, Markup]]:
    """Family, weight, style and the file in base64 of each font."""
    fonts = []
    for path in sorted((KATEX / "fonts").iterdir()):
        family, _, face = path.stem.rpartition("-")
        text = Markup(base64.b64encode(path.read_bytes()).decode("ascii"))
        fonts.append((family, "bold" if "Bold" in face else "normal", "italic" if "Italic" in face else "normal", text))
    return fonts


def _read(names: Sequence[str], suffix: str) -> str:
    """Style sheets or scripts without indentation and comments, which saves a tenth of a small page."""
    lines = [line.strip() for name in names for line in (ASSETS / f"{name}.{suffix}").read_text("utf-8").splitlines()]
    return "\n".join(line for line in lines if line and not line.startswith("//"))


def _digest(source: str) -> str:
    """Return the name by which a content security policy allows one inline element."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode('ascii')}'"
