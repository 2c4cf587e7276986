"""A headless browser for tests of pages, where Chromium is installed, and what a picture shows.

Debian: ``apt install chromium``. Tests that need one are skipped without it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest

#: Without those against background networking, a browser without a network spends its time on failing connections.
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --virtual-time-budget=4000"
)


def browser() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


needs_browser = pytest.mark.skipif(browser() is None, reason="no chromium")


def _run(url: str, *options: str) -> str:
    found = browser()
    assert found is not None, "tests that come here are skipped without a browser"
    with tempfile.TemporaryDirectory() as home:
        done = subprocess.run(
            [found, *FLAGS.split(), f"--user-data-dir={home}/user", *options, url],
            env={**os.environ, "HOME": home},
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def dom(url: str, *, size: tuple[int, int] = (1200, 900)) -> str:
    """The document as it is when its scripts have run."""
    return _run(url, f"--window-size={size[0]},{size[1]}", "--dump-dom")


def screenshot(url: str, target: Path, *, size: tuple[int, int] = (1200, 900)) -> None:
    _run(url, f"--window-size={size[0]},{size[1]}", f"--screenshot={target}")


def assert_shows_something(picture: Path, *, ink: float = 0.01, colours: int = 4) -> None:
    """The picture is not one plain area: a share of its points differs from the commonest colour, in several hues."""
    image = pytest.importorskip("PIL.Image", reason="pillow reads the pictures")
    with image.open(picture) as opened:
        points = np.asarray(opened.convert("RGB")).reshape(-1, 3).astype(np.uint32)
    packed = points[:, 0] << 16 | points[:, 1] << 8 | points[:, 2]
    found, counts = np.unique(packed, return_counts=True)
    share = 1 - counts.max() / counts.sum()
    assert share >= ink, f"{picture}: {100 * share:.2f} % of the points are not background, need {100 * ink:g} %"
    # Rounded, so that the greys of smooth edges of letters are not taken for colours.
    strong = {(int(c) >> 20 & 15, int(c) >> 12 & 15, int(c) >> 4 & 15) for c in found[counts > 0.0002 * counts.sum()]}
    assert len(strong) >= colours, f"{picture}: {len(strong)} colours, need {colours}"
