"""`normfree methods` and `normfree models`: list what can be built and trained."""

from __future__ import annotations

from typing import Annotated

import typer

from normfree.cli.completion import complete_method
from normfree.cli.options import AsJson, Plugins, load_plugins, print_json
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
    as_json: AsJson = False,
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


def list_models(
    as_json: AsJson = False,
) -> None:
    """List the model families and how their names are formed."""
    from normfree.models import catalog

    families = catalog()
    if as_json:
        print_json([family.to_json() for family in families])
        return
    names = ("name", "description", "for example", "form", "skip", "paper")
    columns = tuple(Column(name, style="cyan" if name == "name" else None) for name in names)
    rows = tuple((f.pattern, f.summary, ", ".join(f.examples), f.form, f.skip, f.paper) for f in families)
    print_table(Table("Models", columns, rows))
