"""What all tests share."""

from __future__ import annotations

import signal

import pytest

# In a background job SIGINT is ignored, and so it would be in every process that a test starts to interrupt.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def elsewhere(tmp_path_factory):
    return tmp_path_factory.mktemp("elsewhere")


@pytest.fixture(autouse=True)
def away_from_the_sources(elsewhere, monkeypatch):
    """Run outside the checkout: a child process started with -c has its folder on the path, and the checkout
    holds the package uncompiled."""
    monkeypatch.chdir(elsewhere)
