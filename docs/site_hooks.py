"""What the pages need beyond their text: docstrings of compiled modules, links out of docs/, pages that nobody listed.

Called by MkDocs (``hooks``) and by mkdocstrings (``extensions``); see mkdocs.yml.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.exceptions import PluginError

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\./[^)#\s]+)(?:#[^)\s]*)?\)")


# ---- MkDocs


def on_config(config: Any) -> Any:
    """Read the package where Python finds it, compiled, and list the pages that mkdocs.yml leaves out."""
    package = Path(importlib.import_module("xnnfast").__file__ or "").parent
    config.plugins["mkdocstrings"].config.handlers["python"]["paths"] = [str(package.parent)]
    listed = set(_pages(config.nav))
    more = sorted(path.name for path in Path(config.docs_dir).glob("*.md") if path.name not in listed)
    for part in config.nav:
        if "More" in part:
            part["More"] += more
    config.nav = [part for part in config.nav if part.get("More") != []]
    return config


def _pages(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [page for part in parts for page in _pages(part)]


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Files beside docs/ are no pages: their links become their names, if they exist."""

    def name(link: re.Match[str]) -> str:
        target = (Path(page.file.abs_src_path).parent / link[2]).resolve()
        if not target.exists():
            raise PluginError(f"{page.file.src_path}: {link[2]} does not exist")
        inside = target.relative_to(ROOT)
        return f"{link[1]} (`{inside}`)" if str(inside) != link[1] else f"`{inside}`"

    return LINK.sub(name, markdown)


# ---- mkdocstrings


class RuntimeDocstrings(griffe.Extension):
    """Docstrings as Python has them: stubs have none, and GraphBuilder's are made from the rows of operators."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if not obj.path.startswith("xnnfast.") or "_generated" in obj.path:
            return
        try:
            found: Any = importlib.import_module(obj.module.path)
            for part in [] if obj.is_module else obj.path[len(obj.module.path) + 1 :].split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError):
            return
        text = getattr(found, "__doc__", None)
        if not isinstance(text, str) or not text.strip() or obj.is_type_alias:
            return
        if obj.is_attribute and not (inspect.isdatadescriptor(found) or isinstance(found, property)):
            # A value: the docstring would be that of its type.
            return
        if text.startswith("Alias for field number"):
            return
        # Cython writes the signature in front.
        text = re.sub(r"^[\w.]+\([^\n]*\)(?: -> [^\n]*)?\n+", "", inspect.cleandoc(text))
        text = re.sub(r":(?:meth|class|func|attr|data|mod):`~?([\w.]+)`", r"`\1`", text)
        obj.docstring = griffe.Docstring(text, parent=obj, parser="numpy")
