"""Checks that the links and pictures of a built site lead to pages, anchors and files that exist."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag


class _Reader(HTMLParser):
    """Collects the targets and the anchors of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: set[str] = set()
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for key, value in attrs:
            if key in ("id", "name") and value:
                self.anchors.add(value)
            elif key in ("href", "src") and value:
                self.targets.add(value)


def broken_links(site: Path) -> list[str]:
    """Return 'page: target' for every link that leads nowhere, or to the network for something the page needs."""
    pages: dict[Path, _Reader] = {}
    for path in sorted(site.rglob("*.html")):
        pages[path.resolve()] = reader = _Reader()
        reader.feed(path.read_text(encoding="utf-8"))
    broken = []
    for path, reader in pages.items():
        for target in sorted(reader.targets):
            if target.startswith(("http:", "https:", "mailto:", "data:", "javascript:")):
                continue
            name, anchor = urldefrag(target)
            if name.startswith("/"):  # page 404 is found from the root
                goal = site.resolve() / unquote(name).lstrip("/")
            else:
                goal = (path.parent / unquote(name)).resolve() if name else path
            if goal.is_dir():
                goal = goal / "index.html"
            if not goal.is_file():
                broken.append(f"{path.relative_to(site.resolve())}: {target}")
            elif anchor and goal in pages and unquote(anchor) not in pages[goal].anchors:
                broken.append(f"{path.relative_to(site.resolve())}: {target} (no such anchor)")
    return broken
