"""The documents: every block of Python and of commands in them runs, links lead somewhere, and the site builds."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import doc_files
import pytest
from browser import assert_shows_something, needs_browser, screenshot

import xnnfast

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted(
    path
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("vendor/**/*.md"))
    if path.relative_to(ROOT).parts[0] != "build"
)
#: Pages for users: here every block has a language, which says whether it runs.
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
#: Python and sh run. Commands of other programs (pip, make) are console, forms of a command are text.
LANGUAGES = {"python", "sh", "py", "console", "text", "yaml"}
#: Recipes for engines, which tests/distributed/test_recipes.py runs where they are installed.
LANGUAGES |= {f"py {engine}" for engine in ("ray", "spark", "dask", "distributed", "daft", "beam")}
#: Stands before a block of Python that can't run here, and is followed by the reason.
NOT_RUN = "*Not run by the tests:*"


class Block(NamedTuple):
    language: str
    text: str
    line: int
    #: The line before it that is not empty.
    before: str


def blocks(document: Path, *languages: str) -> list[Block]:
    found, lines, start = [], document.read_text("utf-8").splitlines(), None
    for number, line in enumerate(lines):
        if not line.lstrip().startswith("```"):
            continue
        if start is None:
            start = number
            continue
        before = next((each for each in reversed(lines[:start]) if each.strip()), "")
        body = "\n".join(lines[start + 1 : number]) + "\n"
        found.append(Block(lines[start].strip()[3:], body, start + 1, before))
        start = None
    assert start is None, f"{document}: the block in line {start} does not end"
    return [block for block in found if block.language in languages or not languages]


def name(document: Path) -> str:
    return str(document.relative_to(ROOT))


RUN = [document for document in DOCUMENTS if blocks(document, "python", "sh")]


def test_readme_has_python_to_run() -> None:
    assert len(blocks(ROOT / "README.md", "python")) >= 2
    assert blocks(ROOT / "README.md", "sh")


@pytest.mark.parametrize("document", RUN, ids=name)
def test_blocks_of_a_document_run(document: Path, tmp_path: Path) -> None:
    if blocks(document, "sh"):
        pytest.importorskip("typer", reason="the command needs the extra cli")
    doc_files.make(tmp_path)
    tools = tmp_path / ".tools"
    tools.mkdir()
    for tool, call in (("xnnfast", f"{sys.executable} -m xnnfast"), ("python3", sys.executable)):
        (tools / tool).write_text(f'#!/bin/sh\nexec {call} "$@"\n')
        (tools / tool).chmod(0o755)
    # One after the other in one process: later blocks go on where earlier ones stopped.
    script = ["import subprocess as _subprocess"]
    for block in blocks(document, "python", "sh"):
        if "PIL" in block.text and importlib.util.find_spec("PIL") is None:
            pytest.skip("pillow is not installed")
        if block.language == "python":
            script.append(f"print({f'--- line {block.line}'!r}, flush=True)\n{block.text}")
        else:
            script.append(f"_subprocess.run(['bash', '-euo', 'pipefail', '-c', {block.text!r}], check=True)")
    (tmp_path / ".blocks.py").write_text("\n".join(script), "utf-8")
    done = subprocess.run(
        [sys.executable, ".blocks.py"],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "XDG_CACHE_HOME": str(tmp_path / ".cache")},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_blocks_say_whether_they_run(page: Path) -> None:
    for block in blocks(page):
        where = f"{name(page)}:{block.line}"
        assert block.language in LANGUAGES, f"{where}: {block.language!r} is none of {sorted(LANGUAGES)}"
        if block.language == "py":
            assert block.before.startswith(NOT_RUN) and len(block.before) > len(NOT_RUN) + 10, f"{where}: no reason"
        if block.language == "console":
            assert not re.search(r"^(\$ )?xnnfast ", block.text, re.M), f"{where}: our own commands run in sh blocks"


def test_few_blocks_can_not_run() -> None:
    assert sum(len(blocks(page, "py")) for page in PAGES) <= 3


def test_first_block_prints_what_its_comment_says(tmp_path: Path) -> None:
    code = blocks(ROOT / "README.md", "python")[0].text
    (promised,) = re.findall(r"# (\[\[.*\]\])$", code, re.M)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert promised in done.stdout, done.stdout + done.stderr


# ---- links


def anchors(document: Path) -> set[str]:
    """The places in a document that links may name: its headings, in the form that Markdown gives them."""
    text = re.sub(r"^```.*?^```$", "", document.read_text("utf-8"), flags=re.M | re.S)
    found = set()
    for heading in re.findall(r"^#{1,6} (.+)$", text, re.M):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", heading)
        found.add(re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower()))
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_links_in_a_document_lead_somewhere(document: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", document.read_text("utf-8"), flags=re.M | re.S)
    for target, place in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", text):
        if "://" in target:
            continue
        file = document.parent / target if target else document
        assert file.exists(), target
        if place and file.suffix == ".md":
            assert place in anchors(file), f"{target}#{place}"


def test_dead_links_are_noticed(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# One `two` three\n[here](#one-two-three) [there](b.md)\n")
    with pytest.raises(AssertionError, match=r"b\.md"):
        test_links_in_a_document_lead_somewhere(tmp_path / "a.md")
    (tmp_path / "b.md").write_text("# B\n[back](a.md#nowhere)\n")
    test_links_in_a_document_lead_somewhere(tmp_path / "a.md")
    with pytest.raises(AssertionError, match="nowhere"):
        test_links_in_a_document_lead_somewhere(tmp_path / "b.md")


# ---- the site


def test_reference_has_everything_public() -> None:
    text = (ROOT / "docs" / "reference.md").read_text("utf-8")
    listed = {each.split(".")[-1] for each in re.findall(r"^::: xnnfast\.([\w.]+)$", text, re.M)}
    errors = {each for each in xnnfast.__all__ if each.endswith("Error")}
    assert "::: xnnfast.errors" in text
    assert set(xnnfast.__all__) - errors - listed == {"__version__"}


def site(folder: Path, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    # From elsewhere: in the checkout, Python would find the package uncompiled. Not --quiet, which hides warnings from
    # strict mode as well.
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "-f", root / "mkdocs.yml", "-d", folder / "site"],
        cwd=folder,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )


needs_mkdocs = pytest.mark.skipif(
    any(importlib.util.find_spec(each) is None for each in ("mkdocs", "material", "mkdocstrings_handlers")),
    reason="the site needs the extra docs",
)


@needs_mkdocs
def test_site_builds_and_shows_docstrings(tmp_path: Path) -> None:
    done = site(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    text = re.sub(r"<[^>]+>", "", (tmp_path / "site" / "reference.html").read_text("utf-8"))
    # One sentence from a compiled class, one from its method, one from rows of operators, one from an exception.
    for sentence in (
        "A graph made ready to run.",
        "Run the graph once.",
        "Convolution of NHWC input",
        "A second caller entered an object",
        "Runs batches of any size, on all allowed cores.",
        "The numbers that a value stores for real ones",
    ):
        assert sentence in text, sentence
    # Of compiled classes, signatures come from the stubs; roles of Sphinx have become plain.
    assert "*args" not in text and "check_finite:" in text and ":meth:" not in text
    for file in (tmp_path / "site").rglob("*.html"):
        loaded = re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=\"?(https?://[^\"\s>]+)", file.read_text("utf-8"))
        assert not loaded, f"{file.name} loads {loaded}"


@needs_mkdocs
def test_site_does_not_build_with_dead_links(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "site_hooks.py").write_text((ROOT / "docs" / "site_hooks.py").read_text("utf-8"))
    config = (ROOT / "mkdocs.yml").read_text("utf-8")
    config = re.sub(r"^nav:\n(?:  .*\n)+", "nav:\n  - Home: index.md\n  - More: []\n", config, flags=re.M)
    (tmp_path / "mkdocs.yml").write_text(config)
    for text, fine in (("# Home\n", True), ("# Home\n[x](nowhere.md)\n", False), ("# Home\n[x](#nowhere)\n", False)):
        (tmp_path / "docs" / "index.md").write_text(text)
        done = site(tmp_path, tmp_path)
        assert (done.returncode == 0) == fine, text + done.stdout + done.stderr


@needs_mkdocs
@needs_browser
def test_site_is_shown_by_a_browser(tmp_path: Path) -> None:
    done = site(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for page in ("index", "reference", "formats"):
        screenshot(f"file://{tmp_path}/site/{page}.html", tmp_path / f"{page}.png")
        assert_shows_something(tmp_path / f"{page}.png")
