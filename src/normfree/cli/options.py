"""The option that means the same to every verb."""

from __future__ import annotations

import typer

DEVICE = typer.Option("--device", metavar="NAME", help="cpu, cuda, …; auto takes the best there is.")
