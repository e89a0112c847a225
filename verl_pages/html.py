"""One HTML page that loads nothing from elsewhere: its template, scripts, styles and data.

Text of models, data sets and options is hostile. A page contains it only as ASCII JSON without ``<``, ``>`` and ``&``,
or compressed and in base64; the script puts it into the document as text nodes; and the page's own policy forbids all
other scripts and all connections.
"""

import base64
import hashlib
import html
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

from verl.utils.portable import finite_or_null, printable

CHUNK_BYTES = 1 << 19
"""Uncompressed size at which a chunk is closed. What is opened unpacks its chunk."""

SHARED = files("verl_pages") / "assets"
"""Assets of all pages."""


@dataclass(frozen=True)
class PageAssets:
    """The text of a page before its data."""

    body: str
    """HTML with ``{{title}}``."""
    style: str
    script: str
    connect: str = "'none'"
    """Source of a content security policy that the script may connect to."""

    def fill(self, title: str, index: Mapping[str, Any], chunks: Sequence[str]) -> str:
        """The page with its data; placeholders inside a part are left alone."""
        script = '"use strict";\n(() => {\n' + self.script + "\n})();\n"
        name = html.escape(printable(title)).encode("ascii", "xmlcharrefreplace").decode("ascii")
        parts = {
            "policy": f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(self.style)}; "
            f"connect-src {self.connect}; base-uri 'none'; form-action 'none'",
            "title": name,
            "style": self.style,
            "body": _replace(self.body, {"title": name}),
            "script": script,
            "data": ascii_json(index),
            "chunks": "\n".join(
                f'<script type="text/plain" id="chunk-{i}">{chunk}</script>' for i, chunk in enumerate(chunks)
            ),
        }
        return _replace(read_assets(SHARED, "page.html"), parts)


def ascii_json(value: Any) -> str:
    """ASCII JSON that cannot end a script element: no ``<``, ``>`` or ``&``; numbers that are not finite are null."""
    text = json.dumps(finite_or_null(value), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def pack(text: str) -> str:
    """ASCII ``text``, compressed and in base64."""
    return base64.b64encode(zlib.compress(text.encode("ascii"), 6)).decode("ascii")


def read_assets(folder: Traversable, *names: str) -> str:
    """The text of these files of a package's folder, one after the other."""
    return "\n".join(folder.joinpath(name).read_text(encoding="utf-8") for name in names)


def _replace(template: str, parts: Mapping[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match.group(1)], template)


def _digest(source: str) -> str:
    """The name by which a content security policy allows one inline element."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode('ascii')}'"
