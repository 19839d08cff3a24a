"""HTML for notebooks: a heading, sentences and a table, without scripts or styles of its own."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from normfree.report.tables import Table


def notebook_html(heading: str, sentences: Iterable[str] = (), table: Table | None = None, *, text: str = "") -> str:
    """Return what `_repr_html_` of a result shows; all text is escaped, and line breaks of `text` are kept.

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
