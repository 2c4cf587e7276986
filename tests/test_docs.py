"""The documents: every block of Python in them runs, and the files they name exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted(
    path
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("vendor/**/*.md"))
    if path.relative_to(ROOT).parts[0] != "build"
)


def blocks(document: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", document.read_text("utf-8"), re.M | re.S)


def test_readme_has_python_to_run() -> None:
    assert len(blocks(ROOT / "README.md")) >= 2


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if blocks(d)], ids=lambda d: str(d.relative_to(ROOT)))
def test_python_in_a_document_runs(document: Path, tmp_path: Path) -> None:
    # One after the other in one process: later blocks go on where earlier ones stopped.
    script = tmp_path / "blocks.py"
    script.write_text("\n".join(blocks(document)), "utf-8")
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_first_block_prints_what_its_comment_says(tmp_path: Path) -> None:
    code = blocks(ROOT / "README.md")[0]
    (promised,) = re.findall(r"# (\[\[.*\]\])$", code, re.M)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert promised in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: str(d.relative_to(ROOT)))
def test_links_in_a_document_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)\)", document.read_text("utf-8")):
        if "://" not in target:
            assert (document.parent / target).exists(), target
