"""`normfree models`: list the model families."""

from __future__ import annotations

from typing import Annotated

import typer

from normfree.cli.options import print_json
from normfree.report.tables import Column, Table, print_table


def list_models(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list instead of a table.")] = False,
) -> None:
    """List the model families and how their names are formed."""
    from normfree.models import catalog

    families = catalog()
    if as_json:
        print_json([family.to_json() for family in families])
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
