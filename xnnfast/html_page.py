"""What pages of HTML share that need nothing else: no network, no files beside them.

In come a title, a body and data; out goes the text of a page. Names in files come from strangers, so the page forbids
the browser whatever it does not need: the one script that may run is the one whose digest stands in the head.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
from typing import Any

#: Colours that differ for colour-blind eyes as well; what comes after shares the last one.
COLOURS = ("#3b76c4", "#e08a1e", "#2a9d6f", "#c2476b", "#7a5bbf", "#4aa7c9", "#9a7b3f", "#b05fb3", "#6b8e23", "#8a8f98")

_STYLE = """
:root{--back:#fff;--text:#1d2330;--soft:#667085;--line:#e4e7ec;--panel:#f7f8fa;color-scheme:light dark}
@media(prefers-color-scheme:dark){:root{--back:#14171d;--text:#e6e9ef;--soft:#98a2b3;--line:#2b303a;--panel:#1b1f27}}
*{box-sizing:border-box}body{margin:0;background:var(--back);color:var(--text);font:14px/1.45 system-ui,sans-serif}
"""

#: The data as the script sees it.
_PRELUDE = "'use strict';const DATA=JSON.parse(document.getElementById('data').textContent);"


def document(title: str, body: str, *, style: str, script: str, data: Any) -> str:
    """A whole page. ``body`` is HTML already; ``data`` is what JSON can hold, and ``DATA`` in the script."""
    script = _PRELUDE + script
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return (
        '<!DOCTYPE html>\n<html lang=en><head><meta charset=utf-8><meta name=viewport content="width=device-width">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}{style}</style></head><body>{body}"
        f"<script type=application/json id=data>{embedded(data)}</script><script>{script}</script></body></html>\n"
    )


def save(page: str, path: str | os.PathLike[str]) -> None:
    """Write a page. Names that are no text (bytes of another encoding in a file's name) are spelled out."""
    with open(path, "wb") as stream:
        stream.write(page.encode("utf-8", "backslashreplace"))


def embedded(data: Any) -> str:
    """JSON that can stand inside a script element: nothing in it ends the element or begins a comment."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
