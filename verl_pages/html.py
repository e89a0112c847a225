"""Renders self-contained HTML pages from templates, scripts, styles and data.

Text from models, datasets and options is untrusted. Pages with scripts contain untrusted text either as ASCII JSON
without ``<``, ``>`` and ``&``, or compressed and encoded in base64. Scripts insert this text as text nodes, and the
template escapes all other text. The content security policy forbids any other scripts and any connections.
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
"""Uncompressed size in bytes at which a chunk is full. Pages decompress a chunk when its content is opened."""

BROWSER_SCRIPTS = ("base", "list", "charts", "panels", "diff", "text", "tokens", "samples")
"""Scripts of pages with charts and the response browser."""

ASSETS = Path(__file__).parent / "assets"
KATEX = ASSETS / "katex"

FORMULA = re.compile(r"\\[(\[]|\\begin\{|\$[^$\n]*[\\^_=+*/<>-][^$\n]*\$|\$\$")
"""Pattern of text that may be, or begin, a formula. ``text.js`` makes the final decision."""

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
    """Return the page's HTML.

    Args:
        template: File in ``assets/`` that extends ``page.html``.
        scripts: Names of the scripts, which share one scope. Empty for a page without scripts.
        index: Data that the scripts read when the page is opened.
        chunks: Data that the scripts decompress on demand, as returned by :func:`pack`.
        connect: Source expression of the content security policy to which scripts may connect.
        formulas: Whether to include KaTeX.
    """
    style = _read(styles, "css")
    if formulas:  # without the fonts' addresses, since text.js loads the fonts from the page itself
        style += re.sub(r"@font-face\{[^}]*\}", "", (KATEX / "katex.min.css").read_text("utf-8"))
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
    """Encode ``value`` as ASCII JSON that is safe in a script element. Non-finite numbers become null."""
    text = json.dumps(finite_or_null(value), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def pack(text: str) -> str:
    """Compress ASCII text and encode it in base64."""
    return base64.b64encode(zlib.compress(text.encode("ascii"), 6)).decode("ascii")


def has_formulas(texts: Iterable[str]) -> bool:
    """Return whether a page with ``texts`` needs KaTeX."""
    return any(FORMULA.search(text) for text in texts)


def _katex_fonts() -> list[tuple[str, str, str, Markup]]:
    """Return each font's family, weight, style and base64-encoded file."""
    fonts = []
    for path in sorted((KATEX / "fonts").iterdir()):
        family, _, face = path.stem.rpartition("-")
        text = Markup(base64.b64encode(path.read_bytes()).decode("ascii"))
        fonts.append((family, "bold" if "Bold" in face else "normal", "italic" if "Italic" in face else "normal", text))
    return fonts


def _read(names: Sequence[str], suffix: str) -> str:
    """Read style sheets or scripts, and drop indentation and comments to make small pages a tenth smaller."""
    lines = [line.strip() for name in names for line in (ASSETS / f"{name}.{suffix}").read_text("utf-8").splitlines()]
    return "\n".join(line for line in lines if line and not line.startswith("//"))


def _digest(source: str) -> str:
    """Return the source expression that allows an inline element in a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode('ascii')}'"
