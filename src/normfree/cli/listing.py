"""Verbs that change nothing: `methods` and `models` list them, and `check` verifies the files of stored folders;
and the list of recipes of `train`.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from normfree.cli.options import (
    Plugins,
    complete_method,
    load_plugins,
)
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
    from normfree.methods.method import description

    load_plugins(plugin)
    records = [get(name) for name in methods or names()]
    if as_json:
        typer.echo(json.dumps([record.to_json() for record in records], indent=2, ensure_ascii=False))
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
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list instead of a table.")] = False,
) -> None:
    """List the model families and how their names are formed."""
    from normfree.models import catalog

    families = catalog()
    if as_json:
        typer.echo(json.dumps([family.to_json() for family in families], indent=2, ensure_ascii=False))
        return
    print_table(
        Table(
            title="Models",
            columns=(
                Column("name", style="cyan"),
                Column("description"),
                Column("for example"),
                Column("form"),
                Column("skip"),
                Column("paper"),
            ),
            rows=tuple(
                (family.pattern, family.summary, ", ".join(family.examples), family.form, family.skip, family.paper)
                for family in families
            ),
        )
    )


def check_folders(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER…", help="Runs, converted models or data folders.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Compare the files of stored folders with their checksums: runs, converted models, prepared text and images.

    The exit status is 0 if every file is whole or was written by an earlier release without a checksum, and 1 if one is
    damaged. No code of a folder runs.

    For example: normfree check runs/fashion
    """
    from normfree.train.run.folder_check import verify_folder

    found = [(folder, *verify_folder(folder)) for folder in folders]
    if as_json:
        plain = [{"folder": str(path), "kind": kind, "files": list(map(asdict, files))} for path, kind, files in found]
        typer.echo(json.dumps(plain, indent=1))
    else:
        columns = (Column("file", style="cyan"), Column("state"), Column("reason"))
        for folder, kind, files in found:
            rows = tuple((file.name, file.state, file.why) for file in files)
            counts = ", ".join(f"{count} {state}" for state, count in Counter(file.state for file in files).items())
            print_table(Table(f"{kind} in {folder}", columns, rows, caption=f"{counts}."))
    if any(file.state == "damaged" for _, _, files in found for file in files):
        raise typer.Exit(1)


def list_recipes(as_json: bool) -> None:
    """Print the recipes, as `normfree train --list` does."""
    from normfree.train.recipes import recipes

    found = [(r.name, r.summary, r.reference, r.config) for r in recipes().values()]
    if as_json:
        plain = [{"name": n, "summary": s, "reference": r, "config": asdict(c)} for n, s, r, c in found]
        typer.echo(json.dumps(plain, indent=1, ensure_ascii=False))
        return
    columns = tuple(
        Column(name, style="cyan" if name == "recipe" else None) for name in ("recipe", "description", "from")
    )
    rows = tuple((name, summary, reference) for name, summary, reference, _ in found)
    caption = "normfree train RECIPE runs one; --show prints its settings, --set changes one."
    print_table(Table("Recipes", columns, rows, caption=caption))
