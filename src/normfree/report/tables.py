"""Tables on a terminal, as Markdown and in the HTML of a notebook; numbers, names and curves for their cells."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from normfree.report.terminal import open_console, printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

Justify = Literal["left", "right", "center"]
Rating = Literal["good", "warn", "bad", "info"]
MARKS: dict[str, Rating] = {"✓": "good", "◐": "warn", "✗": "bad", "–": "info"}  # first characters in a marked column
_STYLES: dict[Rating, str] = {"good": "green", "warn": "yellow", "bad": "red", "info": "dim"}

_TAG = re.compile(r"<(?=[A-Za-z/!?])")  # that Markdown would take for HTML
_COMFORT = 20  # the width of a column in a split table, if its content is that wide
_RULE = 100  # the longest rule below the headings in a pipe, where rows are not wrapped
_SHORTEST, _READABLE = 8, 24  # letters of a name that is shortened: at least, and before a column is left out
_BARS = "▁▂▃▄▅▆▇█"
_GAP = 2  # spaces between two columns: the padding of a cell and the divider


@dataclass(frozen=True)
class Column:
    """A column's heading, its alignment and the rich style of its cells.

    The cells of a `marked` column begin with ✓, ◐, ✗ or –, which gives them a colour on a terminal and on a page.
    """

    name: str
    justify: Justify = "left"
    style: str | None = None
    marked: bool = False

    def status(self, cell: str) -> Rating | None:
        """Read the mark of a cell; None in a column without marks.

        >>> Column("verdict", marked=True).status("✗ fails"), Column("any").status("✗ fails")
        ('bad', None)
        """
        return MARKS.get(cell[:1]) if self.marked else None


@dataclass(frozen=True)
class Link:
    """A link to a file, with an address relative to the file that contains the link.

    Raises:
        ValueError: if the address is not relative.
    """

    text: str
    href: str

    def __post_init__(self) -> None:
        if self.href.startswith("/") or ":" in self.href:
            raise ValueError(
                f"link {self.text!r}: expected a relative address, got {self.href!r}; escape ':', drop a leading '/'"
            )


@dataclass(frozen=True)
class Table:
    """A titled grid of text cells.

    `links` are the files of each row. They become a last column in Markdown and on a page; a terminal does not show
    them.

    Raises:
        ValueError: if there is no column, or the number of cells in a row or of links does not fit.

    >>> print(to_markdown(Table("Gains", (Column("layer"), Column("gain", "right")), (("relu", "1.41"),))))
    **Gains**
    <BLANKLINE>
    | layer | gain |
    | --- | ---: |
    | relu | 1.41 |
    """

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str | None = None
    links: tuple[tuple[Link, ...], ...] = ()

    def __post_init__(self) -> None:
        if self.links and len(self.links) != len(self.rows):
            raise ValueError(
                f"table {self.title!r}: expected links for {len(self.rows)} rows, got {len(self.links)}; pass () for a "
                "row without links"
            )
        if not self.columns:
            raise ValueError(f"table {self.title!r}: expected at least one column, got none; pass columns=(Column(…),)")
        for index, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                raise ValueError(
                    f"table {self.title!r}: expected {len(self.columns)} cells in row {index}, got {len(row)}; "
                    "give every column a cell, '' where it is empty"
                )


def print_table(table: Table, console: Console | None = None) -> None:
    """Print a table, wrapped to the width of the terminal; in a pipe, each row is one line.

    If the longest words of the columns do not fit side by side, the table is printed in parts that repeat the first
    column.
    """
    console = console or open_console()
    rows = tuple(tuple(printable(cell) if type(cell) is str else cell for cell in row) for row in table.rows)
    caption = table.caption and printable(table.caption)
    table = replace(table, title=printable(table.title), rows=rows, caption=caption)
    cells = [[column.name, *(row[i] for row in table.rows)] for i, column in enumerate(table.columns)]
    parts = _split(cells, console.width)
    for number, part in enumerate(parts):
        if number:
            console.print()
        title = table.title if number == 0 else ""
        caption = table.caption if number == len(parts) - 1 else None
        grid = _grid(table, part, _fit([cells[i] for i in part], console.width), title, caption)
        if console.is_terminal:
            console.print(grid)
            continue
        with console.capture() as plain:
            console.print(grid)
        lines = [line.rstrip() for line in plain.get().splitlines()]
        console.file.write("".join(f"{line if line.strip('─') else line[:_RULE]}\n" for line in lines))


def narrowed(table: Table, width: int, expendable: Sequence[str]) -> Table:
    """Return a table whose rows take one line each: columns are left out and the first one is shortened until it fits.

    Args:
        table: The table; its cells have no line breaks.
        width: The columns of the terminal.
        expendable: The names of the columns to leave out, the first one first.
    """
    kept = list(range(len(table.columns)))
    natural = [_natural([column.name, *(row[i] for row in table.rows)]) for i, column in enumerate(table.columns)]
    for name in expendable:
        if min(natural[0], _READABLE, width // 3) + sum(natural[i] + _GAP for i in kept[1:]) <= width or len(kept) < 3:
            break
        kept = [i for i in kept if table.columns[i].name != name]
    room = max(_SHORTEST, width - sum(natural[i] + _GAP for i in kept[1:]))

    def short(cell: str) -> str:
        return cell if len(cell) <= room else f"{cell[: room // 2]}…{cell[len(cell) - (room - 1) // 2 :]}"

    rows = tuple((short(row[0]), *(row[i] for i in kept[1:])) for row in table.rows)
    return replace(table, columns=tuple(table.columns[i] for i in kept), rows=rows)


def table_lines(table: Table, width: int) -> RichTable:
    """Return a table that fits into a width as one renderable, for a display that is refreshed in place."""
    rows = tuple(tuple(map(printable, row)) for row in table.rows)
    cells = [[column.name, *(row[i] for row in rows)] for i, column in enumerate(table.columns)]
    return _grid(replace(table, rows=rows), range(len(cells)), _fit(cells, width), table.title, table.caption)


def to_markdown(table: Table) -> str:
    """Write the table in GitHub's Markdown, with its title above and its caption below."""
    rule = {"left": "---", "right": "---:", "center": ":---:"}
    files = [[" ".join(f"[{link.text}]({link.href})" for link in row)] for row in table.links]
    more = files or [[]] * len(table.rows)
    lines = [
        _markdown_row([*(column.name for column in table.columns), *(["files"] if files else [])]),
        _markdown_row([*(rule[column.justify] for column in table.columns), *(["---"] if files else [])]),
        *(_markdown_row([*row, *cells]) for row, cells in zip(table.rows, more, strict=True)),
    ]
    above = [f"**{table.title}**", ""] if table.title else []
    below = ["", table.caption] if table.caption else []
    return "\n".join([*above, *lines, *below])


def _markdown_row(cells: Sequence[str]) -> str:
    texts = (_TAG.sub("&lt;", printable(cell)).replace("|", "\\|").replace("\n", "<br>") for cell in cells)
    return "| " + " | ".join(texts) + " |"


def _grid(table: Table, part: Sequence[int], widths: Sequence[int], title: str, caption: str | None) -> RichTable:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table as RichTable
    from rich.text import Text

    grid = RichTable(
        title=Text(title, "bold") if title else None,
        caption=Text(caption, "dim") if caption else None,
        title_justify="left",
        caption_justify="left",
        header_style="bold",
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for i, width in zip(part, widths, strict=True):
        column = table.columns[i]
        grid.add_column(Text(column.name), justify=column.justify, style=column.style, width=width, overflow="fold")
    for row in table.rows:
        grid.add_row(*(_cell(table.columns[i], row[i]) for i in part))
    return grid


def _cell(column: Column, cell: str) -> Text:
    """A cell as text, so that brackets in it are not read as markup."""
    from rich.text import Text

    status = column.status(cell)
    return Text(cell, _STYLES[status] if status else "")


def _split(cells: Sequence[Sequence[str]], width: int) -> list[list[int]]:
    """The columns of each part: all of them if their words fit, else as many as fit at a comfortable width."""
    words = [_longest_word(column) for column in cells]
    if sum(words) + _GAP * (len(words) - 1) <= width:
        return [list(range(len(cells)))]
    wanted = [max(word, min(_natural(column), _COMFORT)) for column, word in zip(cells, words, strict=True)]
    parts = [[0]]
    for i in range(1, len(cells)):
        if len(parts[-1]) > 1 and sum(wanted[j] + _GAP for j in parts[-1]) + wanted[i] > width:
            parts.append([0])
        parts[-1].append(i)
    return parts


def _fit(cells: Sequence[Sequence[str]], width: int) -> list[int]:
    """The widths of columns side by side: wide columns shrink first, and words break only if they must."""
    room = width - _GAP * (len(cells) - 1)
    natural = [_natural(column) for column in cells]
    if sum(natural) <= room:
        return natural
    words = [_longest_word(column) for column in cells]
    floors = words if sum(words) <= room else [1] * len(cells)
    cap = max(natural)
    while cap > 1 and sum(_capped(natural, floors, cap)) > room:
        cap -= 1
    widths = _capped(natural, floors, cap)
    spare = room - sum(widths)
    for i in sorted(range(len(cells)), key=lambda i: natural[i] - widths[i], reverse=True):
        taken = min(max(spare, 0), natural[i] - widths[i])
        widths[i] += taken
        spare -= taken
    return widths


def _capped(natural: Sequence[int], floors: Sequence[int], cap: int) -> list[int]:
    return [max(floor, min(width, cap)) for width, floor in zip(natural, floors, strict=True)]


def _natural(column: Sequence[str]) -> int:
    from rich.cells import cell_len

    return max(1, *(cell_len(line) for cell in column for line in cell.split("\n")))


def _longest_word(column: Sequence[str]) -> int:
    from rich.cells import cell_len

    return max((cell_len(word) for cell in column for word in cell.split()), default=1)


def notebook_html(heading: str, sentences: Iterable[str] = (), table: Table | None = None, *, text: str = "") -> str:
    """Return the HTML for `_repr_html_` of a result; all text is escaped, and line breaks of `text` are kept.

    >>> notebook_html("a < b", ["one"])
    '<div><b>a &lt; b</b><p>one</p></div>'
    """
    parts = [f"<b>{escape(heading)}</b>", *(f"<p>{escape(sentence)}</p>" for sentence in sentences if sentence)]
    if text:
        parts.append(f"<pre>{escape(text)}</pre>")
    if table is not None:
        sides = [f' style="text-align:{column.justify}"' for column in table.columns]
        parts.append("<table><thead><tr>")
        parts += [f"<th{side}>{escape(column.name)}</th>" for column, side in zip(table.columns, sides, strict=True)]
        parts.append("</tr></thead><tbody>")
        for row in table.rows:
            cells = (f"<td{side}>{escape(str(cell))}</td>" for cell, side in zip(row, sides, strict=True))
            parts.append(f"<tr>{''.join(cells)}</tr>")
        parts.append("</tbody></table>")
        if table.caption:
            parts.append(f"<p><small>{escape(table.caption)}</small></p>")
    return f"<div>{''.join(parts)}</div>"


def compact(number: float) -> str:
    """Write a number with three significant digits, thousands separated; powers of ten below 1e-3 and above 1e6.

    >>> [compact(n) for n in (180.4, 0.01234, 1234567 / 100, 2.0, 1e-5, 3.5e7, 0.0, float("inf"))]
    ['180', '0.0123', '12,300', '2', '1e-5', '3.5e7', '0', 'inf']
    """
    if number != number or number in (float("inf"), float("-inf")) or number == 0:
        return f"{number:.3g}"
    rounded = float(f"{number:.3g}")
    if not 1e-3 <= abs(rounded) <= 1e6:
        digits, _, power = f"{rounded:.2e}".partition("e")
        return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"
    return f"{rounded:,.0f}" if abs(rounded) >= 100 else f"{rounded:.3g}"


def shorten_names(names: Sequence[str], limit: int = 3) -> str:
    """List the first few names and count the rest.

    >>> shorten_names(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def sparkline(values: Sequence[float], width: int = 20) -> str:
    """Draw a curve as one line of bars; each bar is the mean logarithm of its share of the values.

    A bar is ✗ if one of its values is NaN or infinite, and 0 if all of them are zero. The line spans at least a decade,
    so that noise does not look like growth.

    >>> sparkline([1, 10, 100, 1000])
    '▁▃▆█'

    Raises:
        ValueError: if there are no values, the width is below 1, or a value is negative.
    """
    numbers = [float(value) for value in values]
    if not numbers or width < 1:
        raise ValueError(
            f"expected values and width >= 1, got {len(numbers)} values and width {width}; pass at least one"
        )
    if (negative := next((v for v in numbers if v < 0), None)) is not None:
        raise ValueError(f"expected values >= 0 for a logarithmic line, got {negative:g}; pass their sizes")
    count = min(width, len(numbers))
    edges = [len(numbers) * i // count for i in range(count + 1)]
    bars = [_mean_logarithm(numbers[a:b]) for a, b in pairwise(edges)]
    drawn = [bar for bar in bars if isinstance(bar, float)] or [0.0]
    low, high = min(drawn), max(drawn)
    if high - low < 1:
        low, high = (low + high) / 2 - 0.5, (low + high) / 2 + 0.5
    top = len(_BARS) - 1
    return "".join(bar if isinstance(bar, str) else _BARS[round((bar - low) / (high - low) * top)] for bar in bars)


def _mean_logarithm(values: Sequence[float]) -> float | str:
    if not all(map(math.isfinite, values)):
        return "✗"
    drawn = [math.log10(v) for v in values if v > 0]
    return math.fsum(v / len(drawn) for v in drawn) if drawn else "0"
