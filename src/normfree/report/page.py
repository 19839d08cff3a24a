"""A single self-contained HTML page that works offline: verdicts, interactive charts, and tables."""

from __future__ import annotations

import json
import math
import re
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args

from normfree.errors import missing_package
from normfree.report.panels import COLOURS, DASHES, SHAPES, Curve, Panel, curve_names, describe_gaps
from normfree.report.tables import Link, Rating, Table
from normfree.storage.writing import write_text

# A power such as L^(-1/2) or 0.9^l, and an index such as a_1 or Σ_{k<l}; a name such as he_in has neither.
_RAISED = re.compile(r"(?<=[\w)\]>])\^(?:\(((?:[^()]|\([^()]*\))*)\)|\{([^{}]*)\}|(-?\d+/\d+|-?\w+))")
_LOWERED = re.compile(r"(?<![\w.])(?<![^\W\d]/)([^\W\d_]|&[#\w]+;)_(?:\{([^{}]*)\}|([^\W_])(?![^\W²³]))")
_POWER_OF_TEN = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)e([+-]?)0*(\d+)(?!\w|\.\d)")  # 2.1e-06
_MINUS = re.compile(r"(?<![\w)\]}>/-])-(?=[\dα-ωΑ-Ω√∞])|(?<=\S )-(?= \S)")  # of a number, or between two terms
_OPTION = re.compile(r"(?<!\S)-{1,2}\w[\w-]*")  # of a command; browsers break a line after a hyphen
_UNBROKEN = re.compile(r"(?<=\d) (?=%)|(?<=[=≈≤≥]) (?=[^\s-])")  # a line does not break at these spaces

_IDS = ("all", "data", "download", "legend", "theme", "tooltip", "written")  # ids that the page itself uses


@dataclass(frozen=True)
class Card:
    """A verdict on one method: its name, a status, a headline and a sentence or two.

    Consecutive cards of the same `group` are small and stand below a heading with the group's name. The names of cards
    and groups link to the sections with the same names.

    Raises:
        ValueError: if the status is not good, warn, bad or info.
    """

    name: str
    status: Rating
    headline: str
    text: str = ""
    group: str = ""

    def __post_init__(self) -> None:
        if self.status not in get_args(Rating):
            raise ValueError(
                f"card {self.name!r}: expected status good, warn, bad or info, got {self.status!r}; choose one of them"
            )


@dataclass(frozen=True)
class Section:
    """A part of a page: a heading, paragraphs, links to files, charts and tables. A card with its `name` links to it.

    The `folded` tables come last and open on a click.
    """

    title: str
    text: tuple[str, ...] = ()
    panels: tuple[Panel, ...] = ()
    tables: tuple[Table, ...] = ()
    name: str = ""
    links: tuple[Link, ...] = ()
    folded: tuple[Table, ...] = ()


@dataclass(frozen=True)
class Page:
    """The content of a page from top to bottom. A card and a curve of the same name share a colour.

    One legend stands above all charts. If there are more curves than colours and dashes can distinguish, each section
    has its own legend and colours. Every line of the subtitle is a paragraph. The tables of the `summary` stand above
    the charts. `written` is the time of writing in seconds since 1970, which the page shows unless it is 0. A page of
    work in progress loads itself again every `refresh` seconds, and keeps hidden curves hidden.
    """

    title: str
    subtitle: str = ""
    cards: tuple[Card, ...] = ()
    panels: tuple[Panel, ...] = ()
    sections: tuple[Section, ...] = ()
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()
    summary: tuple[Table, ...] = ()
    refresh: int = 0
    written: float = 0.0

    @property
    def places(self) -> dict[str, str]:
        """The HTML ids of the sections with a name.

        An id depends only on the name, unless two names give the same id. Links to a section therefore stay valid when
        sections are added: fixup/table1 is at #fixup-table1.
        """
        places: dict[str, str] = {}
        for i, name in enumerate(section.name for section in self.sections):
            id_ = re.sub(r"[^A-Za-z0-9.-]+", "-", name)
            if name:
                places[name] = f"{id_}-{i}" if id_ in (*_IDS, *places.values()) else id_
        return places

    @property
    def others(self) -> tuple[Section, ...]:
        """The sections with a name that no card links to."""
        linked = {text for card in self.cards for text in (card.name, card.group)}
        return tuple(section for section in self.sections if section.name and section.name not in linked)

    @property
    def all_panels(self) -> tuple[Panel, ...]:
        """All panels in order, including those of the sections."""
        return (*self.panels, *(panel for section in self.sections for panel in section.panels))


def page_data(page: Page) -> dict[str, Any]:
    """Convert the page to plain data for JSON; NaN and infinities become "NaN", "Infinity" and "-Infinity"."""
    data = asdict(page)
    parts = (data, *data["sections"])
    for table in (
        table for part in parts for table in (*part["tables"], *part.get("folded", ()), *part.get("summary", ()))
    ):
        table["columns"] = [column["name"] for column in table["columns"]]
    for panel in (panel for part in parts for panel in part["panels"]):
        panel["x"] = [float(position) for position in panel["x"]]
        for curve in panel["curves"]:
            curve["x"] = [float(position) for position in curve["x"]]
            curve["values"] = [_plain(float(value)) for value in curve["values"]]
            curve["spread"] = [_plain(float(half)) for half in curve["spread"]]
            curve["singles"] = [[_plain(float(value)) for value in single] for single in curve["singles"]]
    return data


def render_page(page: Page) -> str:
    """Render the page as one HTML text that loads nothing from elsewhere.

    Every text is escaped, and the data is a JSON block without `<`, `>` and `&`. A content security policy with the
    hashes of the one script and the one style forbids all other scripts, styles and requests.

    Raises:
        ImportError: if jinja2 is not installed.
    """
    try:
        import jinja2
        from markupsafe import Markup
    except ImportError as error:
        raise ImportError(missing_package("jinja2", "a page")) from error
    names = curve_names(page.all_panels)
    split = len(names) > len(COLOURS) * len(DASHES)
    script = _asset("page.js")
    style = _asset("page.css") + _palette()
    data = json.dumps(page_data(page), allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        data = data.replace(character, f"\\u{ord(character):04x}")
    html: str = _template(jinja2.Environment, jinja2.StrictUndefined).render(
        page=page,
        names=names,
        split=split,
        legend=lambda panels: _looks(panels if split else page.all_panels),
        marks={"good": "✓", "warn": "!", "bad": "✕", "info": "i"},
        breakable=lambda name: Markup("<wbr>").join(re.split(r"(?<=[/_])", name)),
        shape=lambda index: list(SHAPES.values())[index % len(SHAPES)],
        gaps=describe_gaps,
        formulas=formulas,
        written=datetime.fromtimestamp(page.written, UTC).strftime("%Y-%m-%d %H:%M:%S UTC") if page.written else "",
        summary=_summary,
        script=Markup(script),
        style=Markup(style),
        data=Markup(data),
        policy=f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}",
    )
    return html


def write_page(page: Page, path: str | Path) -> None:
    """Write the page; missing folders are created. If writing fails, a previous file stays as it was.

    Raises:
        ImportError: if jinja2 is not installed.
    """
    write_text(Path(path), render_page(page))


def set_formulas(text: str) -> str:
    """Set the powers, indices, powers of ten and minus signs in a text that is HTML or Markdown already.

    >>> set_formulas("a_1 and L^(-1/2), but he_in; 2.1e-06 - 3")
    'a<sub>1</sub> and L<sup>−1/2</sup>, but he_in; 2.1·10<sup>−6</sup> − 3'
    """
    text = _POWER_OF_TEN.sub(_power_of_ten, _UNBROKEN.sub("\N{NO-BREAK SPACE}", text))
    text = _LOWERED.sub(lambda m: f"{m[1]}<sub>{_minus(m[2] or m[3])}</sub>", text)
    text = _RAISED.sub(lambda m: f"<sup>{_minus(m[1] or m[2] or m[3])}</sup>", text)
    return _MINUS.sub("−", text)


def _power_of_ten(found: re.Match[str]) -> str:
    lead = "" if found[1] == "1" else f"{found[1]}·"
    return f"{lead}10<sup>{_minus(found[2].strip('+'))}{found[3]}</sup>"


def _minus(text: str) -> str:
    return text.replace("-", "−")


def formulas(text: str) -> str:
    """Escape a text for a page, set its formulas, and set what stands between backticks as code."""
    from markupsafe import Markup, escape

    parts = str(escape(text)).split("`")
    if len(parts) % 2 == 0:  # a backtick without a partner
        parts = ["`".join(parts)]
    return Markup("").join(
        Markup(f"<code>{_OPTION.sub(_unbroken, part)}</code>" if number % 2 else set_formulas(part))
        for number, part in enumerate(parts)
    )


def _unbroken(found: re.Match[str]) -> str:
    return f"<span>{found[0]}</span>"


def _plain(value: float) -> float | str:
    if math.isnan(value):
        return "NaN"
    return value if math.isfinite(value) else "Infinity" if value > 0 else "-Infinity"


def _summary(curve: Curve) -> tuple[str, ...]:
    """A curve in numbers: the count of its values, the first, the smallest, the largest and the last one."""
    finite = [value for value in curve.values if math.isfinite(value)] or [math.nan]
    chosen = (curve.values[0], min(finite), max(finite), curve.values[-1])
    return (str(len(curve.values)), *(f"{value:.3g}" for value in chosen))


def _looks(panels: Sequence[Panel]) -> dict[str, str]:
    """The CSS classes of each curve in a legend; curves that are never drawn as a line are shown as a point."""
    joined = {curve.name for panel in panels if not panel.names for curve in panel.curves}
    names = enumerate(curve_names(panels))
    return {name: _look(index) + ("" if name in joined else " point") for index, name in names}


def _look(index: int) -> str:
    """The CSS classes for the colour and dash of the curve with this index among the names."""
    return f"curve-{index % len(COLOURS)} dash-{index // len(COLOURS) % len(DASHES)}"


def _palette() -> str:
    """The CSS rules of `_look`; each colour has a value for light and one for dark mode."""
    rules = [
        f".curve-{i} {{ --curve: {light}; --curve: light-dark({light}, {dark}); }}"
        for i, (light, dark) in enumerate(COLOURS)
    ]
    for i, dash in enumerate(DASHES):
        lengths = " ".join(f"{2 * length:g}" for length in dash) or "none"
        rules.append(f".dash-{i} {{ --dash: {lengths}; }}")
    return "\n".join(rules) + "\n"


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


@cache
def _template(environment: Any, undefined: Any) -> Any:
    """Compile the template once, because a page of work in progress is rendered again and again."""
    settings = {"autoescape": True, "undefined": undefined, "trim_blocks": True, "lstrip_blocks": True}
    return environment(**settings).from_string(_asset("page.html.jinja"))


@cache
def _asset(name: str) -> str:
    return files("normfree.report").joinpath("assets", name).read_text(encoding="utf-8")
