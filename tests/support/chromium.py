"""A plugin of pytest: Chromium for the tests marked `browser`. tests/conftest.py names it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

_FLAGS = (  # Chromium as root, and without its own traffic
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium, for the tests of a file."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        pytest.fail("expected playwright, found none; run make setup, or: pip install playwright")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.fail("expected chromium on the path, found none; run: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=list(_FLAGS))
        yield browser
        browser.close()
