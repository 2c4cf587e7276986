"""Where the package under test comes from, and that nothing of a machine got into its files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import xnnfast

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.skipif(os.environ.get("XNNFAST_TEST_INSTALLED") != "1", reason="make test checks the installed package")
def test_installed_package_is_the_one_under_test() -> None:
    # An in-place build of another day would hide what the installation lacks.
    folder = Path(xnnfast.__path__[0]).resolve()
    assert folder != ROOT / "xnnfast"
    assert "site-packages" in folder.parts


def test_typing_marker_is_installed() -> None:
    assert Path(xnnfast.__path__[0], "py.typed").is_file()
