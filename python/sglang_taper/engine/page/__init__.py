"""The page `GET /taper/` as one HTML text: markup, style and script in one answer.

Nothing is loaded from anywhere else; the content security policy allows exactly the
style and the script that are in it, and requests to this server.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent
STYLES = ("page.css",)
# In this order: they share one scope.
SCRIPTS = ("text.js", "forest.js", "charts.js", "page.js")


@cache
def html() -> str:
    markup = (FOLDER / "page.html").read_text("utf-8")
    return markup.replace("/*style*/", _style()).replace("/*script*/", _script())


@cache
def headers() -> dict[str, str]:
    policy = (
        "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; "
        f"style-src '{_digest(_style())}'; script-src '{_digest(_script())}'"
    )
    return {
        "Content-Security-Policy": policy,
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }


@cache
def _style() -> str:
    return _joined(STYLES)


@cache
def _script() -> str:
    return '"use strict";\n' + _joined(SCRIPTS)


def _joined(names: tuple[str, ...]) -> str:
    return "\n".join((FOLDER / name).read_text("utf-8") for name in names)


def _digest(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return "sha256-" + base64.b64encode(digest).decode("ascii")
