"""Turns the Markdown documents of the repository into pages of the site: splits them, and rewrites their links."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"^ *(```|~~~)")
ANCHOR = re.compile(r'^<a id="([\w-]+)"></a>\n+(#+ .*)$', re.M)
FILES = {".png", ".svg", ".json", ".jsonl", ".toml", ".ipynb"}  # files that pages may link to
ITEM = re.compile(r"^( *)([-*]|\d+\.) +")


@dataclass(frozen=True)
class Page:
    """A page of the site.

    Attributes:
        path: The path in the site, such as 'guides/convert.md'.
        text: The Markdown of the page.
        source: The document that the text comes from, relative to the repository; links in the text start there.
    """

    path: str
    text: str
    source: str


def slug(heading: str) -> str:
    """Return the anchor of a heading, as GitHub and Python-Markdown make it.

    >>> slug("Build and train in your own loop"), slug("Fixup's `Method`")
    ('build-and-train-in-your-own-loop', 'fixups-method')
    """
    return re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", heading.strip().lower()))


def anchors(text: str) -> set[str]:
    """Return the anchors of a Markdown text: its headings, and those that it sets itself."""
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {slug(heading) for heading in headings} | set(re.findall(r'<a id="([\w-]+)"', text))


def document(name: str) -> str:
    """Return a document of the repository."""
    return (ROOT / name).read_text(encoding="utf-8")


def sections(text: str) -> dict[str, str]:
    """Return the parts of a document by their second-level headings; '' is the part before the first of them."""
    parts: dict[str, list[str]] = {"": []}
    current, fenced = "", False
    for line in text.splitlines():
        fenced ^= bool(FENCE.match(line))
        if line.startswith("## ") and not fenced:
            current = line.removeprefix("## ")
            moved: list[str] = []  # an anchor above a heading belongs to it
            last = parts[list(parts)[-1]]
            while last and (not last[-1].strip() or last[-1].startswith("<a id=")):
                moved.insert(0, last.pop())
            parts[current] = moved
        parts[current].append(line)
    return {heading: "\n".join(lines).strip() + "\n" for heading, lines in parts.items()}


def promoted(section: str) -> str:
    """Return a section as a page of its own: every heading moves up by one level."""
    lines, fenced = [], False
    for line in section.splitlines():
        fenced ^= bool(FENCE.match(line))
        lines.append(line.removeprefix("#") if line.startswith("##") and not fenced else line)
    return "\n".join(lines) + "\n"


def for_python_markdown(text: str) -> str:
    """Return a text of GitHub's Markdown as Python-Markdown reads it alike.

    Contents of list items are indented by four spaces, a list stands apart from the paragraph above it, `<details>`
    contains Markdown, and anchors above a heading become those of the heading.

    >>> for_python_markdown("text:" + chr(10) + "- a" + chr(10) + chr(10) + "  b")
    'text:\\n\\n- a\\n\\n    b'
    """
    text = ANCHOR.sub(r"\2 { #\1 }", text)
    text = text.replace("<details>", '<details markdown="1">')
    lines: list[str] = []
    items: list[int] = []  # where the content of each enclosing list item starts
    fenced = False
    for line in text.splitlines():
        if not line.strip():
            lines.append("")
            continue
        indent = len(line) - len(line.lstrip())
        item = None if fenced else ITEM.match(line)
        after_blank = not lines or not lines[-1]
        if not fenced and (item or after_blank):
            while items and indent < items[-1]:
                items.pop()
            if not items and item and indent > 3:
                item = None  # code
        if item:
            if not items and not after_blank and not ITEM.match(lines[-1]) and not lines[-1].startswith("    "):
                lines.append("")
            lines.append("    " * len(items) + line.lstrip())
            items.append(len(item.group(0)))
        elif items:
            lines.append("    " * len(items) + " " * max(indent - items[-1], 0) + line.lstrip())
        else:
            lines.append(line)
        fenced ^= bool(FENCE.match(line))
    return "\n".join(lines)


class Links:
    """Rewrites links between documents of the repository as links between pages of the site."""

    def __init__(self, pages: list[Page]) -> None:
        self.pages = pages
        self.files: set[str] = set()  # files of the repository that pages link to
        self.places = {(page.source, anchor): page.path for page in pages for anchor in anchors(page.text)}
        self.first: dict[str, str] = {}
        for page in pages:
            self.first.setdefault(page.source, page.path)

    def rewritten(self, page: Page) -> str:
        """Return the text of a page with its links rewritten; a link to a folder or to code becomes plain text."""
        parts, fenced = [], False
        block: list[str] = []
        for line in [*page.text.splitlines(), "```"]:
            if FENCE.match(line):
                text = "\n".join(block)
                parts.append(text if fenced else LINK.sub(lambda m: self._link(m, page), text))
                parts.append(line)
                block, fenced = [], not fenced
            else:
                block.append(line)
        return "\n".join(parts[:-1]) + "\n"

    def _link(self, match: re.Match[str], page: Page) -> str:
        image, text, target = match.groups()
        if re.match(r"[a-z]+:", target):
            return match.group(0)
        name, _, anchor = target.partition("#")
        folder = Path(page.source).parent
        source = os.path.normpath(folder / name).replace(os.sep, "/") if name else page.source
        if source in self.first:
            place = self.places.get((source, anchor), self.first[source])
            if place == page.path and anchor:
                return f"{image}[{text}](#{anchor})"
            suffix = f"#{anchor}" if anchor else ""
        elif (ROOT / source).is_file() and Path(source).suffix in FILES:
            self.files.add(source)
            place, suffix = f"files/{source}", ""
        else:
            return text
        return f"{image}[{text}]({os.path.relpath(place, Path(page.path).parent)}{suffix})"
