"""A plugin of pytest: Chromium and its tabs for the tests marked `browser`. tests/conftest.py names it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

Open = Callable[..., "Page"]

FRAMES = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"

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


@pytest.fixture
def open_file(browser: Browser) -> Iterator[Open]:
    """Opens a file in a tab; at the end there must have been no message, error, dialog or request elsewhere."""
    wrong: list[str] = []
    contexts = []

    def open_it(path: Path, width: int = 1200, height: int = 900, **options: Any) -> Page:
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        tab = context.new_page()
        tab.on("console", lambda message: wrong.append(f"{message.type}: {message.text}"))
        tab.on("pageerror", lambda error: wrong.append(f"error: {error}"))
        tab.on("dialog", lambda dialog: (wrong.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        tab.on("request", lambda r: r.url.startswith(("file:", "blob:")) or wrong.append(f"request: {r.url}"))
        tab.goto(path.as_uri())
        return tab

    yield open_it
    for context in contexts:
        context.close()
    assert not wrong


def settle(tab: Page) -> None:
    """Wait for two frames: events of scrolling and resizing have come, and what they change is drawn."""
    tab.evaluate(FRAMES)
