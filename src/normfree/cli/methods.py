"""`normfree methods`: list the methods, or explain some of them."""

from __future__ import annotations

from typing import Annotated

import typer

from normfree.cli.completion import complete_method
from normfree.cli.options import Plugins, load_plugins, print_json
from normfree.report import Column, Table, print_table


def list_methods(
    methods: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME…",
            help="Explain these methods, with their options and papers.",
            autocompletion=complete_method,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list instead of a table.")] = False,
    plugin: Plugins = None,
) -> None:
    """List the methods: how each scales a residual sum and initializes its weights.

    For example: normfree methods fixup
    """
    from normfree.methods import get, names
    from normfree.methods.method_registry import description

    load_plugins(plugin)
    records = [get(name) for name in methods or names()]
    if as_json:
        print_json([record.to_json() for record in records])
        return
    if methods:
        texts = (f"{record.name}: {record.summary}\n\n{description(record.name)}".rstrip() for record in records)
        typer.echo("\n\n\n".join(texts))
        return
    rows = [record.row() for record in records]
    columns = tuple(Column(key, style="cyan" if i == 0 else None) for i, key in enumerate(rows[0])) if rows else ()
    print_table(
        Table(
            title="x ← p(c · (a · h(s) + β · f(e(α · x)) + δ))",
            columns=columns or (Column("method"),),
            rows=tuple(tuple(row.values()) for row in rows),
            caption=f"{len(rows)} methods. Options follow the name: hanin:r=0.8. normfree methods NAME explains one.",
        )
    )
